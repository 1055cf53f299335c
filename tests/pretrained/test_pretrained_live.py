"""Every family against `transformers`, run here; skips where it is not installed.

RANK_COLLAPSE_CHECKPOINTS adds checkpoint folders, separated by colons, of any family and size.
"""

import os
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import architectures

from comparison import largest_difference, ours

TOLERANCE = 1e-5
FOLDERS = [f for f in os.environ.get("RANK_COLLAPSE_CHECKPOINTS", "").split(":") if f]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_of_the_environment(folder):
    model = architectures.transformers.AutoModel.from_pretrained(
        Path(folder), local_files_only=True, attn_implementation="eager"
    )
    model = model.float().eval()
    arguments = architectures.inputs(model, n=24)
    worst = largest_difference(
        ours(folder, arguments), architectures.run(model, arguments), arguments
    )
    assert max(worst.values()) < TOLERANCE, worst
