"""What a stream refuses: weights, files, texts and groups that mean nothing, each in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import each_is_refused
from safetensors.numpy import load_file, save_file

from rank_collapse import pretrained
from rank_collapse.measures.profiles import ProfilePass
from rank_collapse.network.passes import States
from rank_collapse.pretrained import Group
from rank_collapse.pretrained.checkpoint import Checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
INPUTS = {"x": np.array([[3, 1, 4, 1]])}
STATES = {"whole": Group((("states", States()),))}
PROFILE = (("profile", ProfilePass(("residual_ratio",))),)


def copied(tmp_path, name="llama-grouped"):
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def rewritten(folder, name, change):
    """The one tensor's bytes changed in place."""
    path = Checkpoint(folder).entries[name].path
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)


def test_values_that_are_not_finite_are_named_when_their_layer_comes(tmp_path):
    folder, done = copied(tmp_path), []

    def spoil(a):
        a[1, 2] = np.nan
        return a

    rewritten(folder, "model.layers.1.mlp.up_proj.weight", spoil)
    source = pretrained.open_checkpoint(folder)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        pretrained.stream(source, INPUTS, STATES, done=lambda s: done.append(s.layers))
    assert done == [1]


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        ("layers.1.mlp.down_proj", 3e38, "layer 1: hidden states are not finite: weights or inp"),
        ("", 0.0, "layer 0: hidden states are all 0; check the weights"),
    ],
)
def test_weights_that_make_the_states_mean_nothing_are_said(names, value, message, tmp_path):
    """Weights of 1e37 gave NaN in every measure and exit code 0, zeros failed at the end."""
    folder = copied(tmp_path)
    for name in [name for name in Checkpoint(folder).names if names in name]:
        rewritten(folder, name, lambda a: np.full_like(a, value))
    source = pretrained.open_checkpoint(folder)
    with pytest.raises(ValueError, match=message):
        pretrained.stream(source, INPUTS, STATES)


def test_tokens_beyond_the_positions_or_the_vocabulary():
    source = pretrained.open_checkpoint(GOLDEN / "gpt2-head")
    groups = {"all": Group(PROFILE)}
    each_is_refused(
        (
            lambda: pretrained.stream(source, {"x": np.ones((1, 21), int)}, groups),
            "21 tokens are more than the 20 positions",
        ),
        (
            lambda: pretrained.stream(source, {"x": np.full((1, 4), 40)}, groups),
            "token id 40 is not below vocab_size=40",
        ),
    )


def test_inputs_and_groups_that_do_not_fit():
    source = pretrained.open_checkpoint(GOLDEN / "gpt2-head")

    def refused(words, rows=3, *, chunk=8, **group):
        inputs = {"x": np.full((3, 4), 5), "mask": np.ones((rows, 4), bool)}
        groups = {"all": Group(PROFILE), "some": Group(PROFILE, **group)}
        for asked in (pretrained.stream, lambda *a, **k: pretrained.state_like(*a, 1, **k)):
            with pytest.raises(ValueError, match=words) as error:
                asked(source, inputs, groups, chunk=chunk)
            assert "\n" not in str(error.value)

    refused("different lengths.*'x': 3, 'mask': 4", rows=4)
    refused("different lengths.*'x': 3, 'mask': 2", rows=2)
    refused("chunk=0 is not 1 or more", chunk=0)
    refused("group 'some' has none of 3 examples: first=3, last=None", first=3)
    refused("group 'some' has none of 3 examples: first=2, last=2", first=2, last=2)


def test_weights_of_whole_numbers_are_said_to_be_quantised(tmp_path):
    folder = copied(tmp_path, "bert")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(n for n in header if n.endswith("layer.1.output.dense.weight"))
    header[name]["dtype"] = "I32"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(ValueError, match=r"is of int32: a quantised checkpoint"):
        pretrained.open_checkpoint(folder)
