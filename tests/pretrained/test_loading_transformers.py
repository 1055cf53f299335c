"""Every family against `transformers`, run here; skips where it is not installed.

RANK_COLLAPSE_CHECKPOINTS adds checkpoint folders, separated by colons, of any family and size.
"""

import json
import os
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.oracles import architectures

from rank_collapse import pretrained
from rank_collapse.pretrained.checkpoint_files import open_weights
from tests.oracles.checkpoint_arrays import largest_difference, ours

TOLERANCE = 1e-5
FOLDERS = [f for f in os.environ.get("RANK_COLLAPSE_CHECKPOINTS", "").split(":") if f]
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", architectures.CASES)
def test_hidden_states_and_attentions(name, tmp_path):
    case = architectures.CASES[name]
    model = architectures.build(case)
    architectures.save(model, tmp_path, case.saved)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    if case.saved.startswith("sharded"):
        assert sum(f.name.endswith((".safetensors", ".bin")) for f in tmp_path.iterdir()) > 1
    arguments = architectures.inputs(model)
    worst = largest_difference(
        ours(tmp_path, arguments), architectures.run(model, arguments), arguments
    )
    assert max(worst.values()) < TOLERANCE, worst
    assert before == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


def check(folder):
    """Asserts that a folder, of any family and size, gives the states that `transformers` has."""
    kind = architectures.transformers.AutoModel
    model_type = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    parts = pretrained.FAMILIES[model_type].parts
    if parts and not any("decoder.block." in name for name in open_weights(folder).names):
        kind = architectures.transformers.AutoModelForTextEncoding
    model = kind.from_pretrained(folder, local_files_only=True, attn_implementation="eager")
    model = model.float().eval()
    positions = pretrained.config_of(folder).embedding.num_positions
    arguments = architectures.inputs(model, n=min(24, positions or 24))
    worst = largest_difference(
        ours(folder, arguments), architectures.run(model, arguments), arguments
    )
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_of_the_environment(folder):
    check(Path(folder))


UNUSUAL = {
    "20 positions": architectures.CASES["bert"],
    "18 positions behind the padding's": architectures.CASES["roberta"],
    "3 positions": architectures.Case("GPT2Model", architectures.GPT2 | {"n_positions": 3}),
    "an encoder alone": architectures.Case("T5EncoderModel", architectures.T5),
    "another encoder alone": architectures.Case(
        "MT5EncoderModel", architectures.T5 | {"feed_forward_proj": "gated-gelu"}
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_folders_of_few_positions_and_of_an_encoder_alone(name, tmp_path):
    case = UNUSUAL[name]
    architectures.save(architectures.build(case), tmp_path, case.saved)
    check(tmp_path)
