"""What a stream refuses: weights, files, texts and groups that mean nothing, each in one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.paths.truncation import TruncatedPass
from rank_collapse.pretrained import AblationSpec, Group, InMemory, streaming
from rank_collapse.pretrained.checkpoint_files import open_weights
from tests.oracles import draws
from tests.pretrained.test_streaming import STATES
from tests.support.folders import GOLDEN
from tests.support.refusals import is_refused, parametrize_refusals

INPUTS = {"x": np.array([[3, 1, 4, 1]])}
PROFILE = (("profile", ProfilePass(("residual_ratio",))),)


def copy_checkpoint(tmp_path, name="llama-grouped"):
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def rewrite_tensor(folder, name, change):
    """Rewrites one tensor of a folder's files."""
    path = open_weights(folder).entries[name].path
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)


def test_values_that_are_not_finite_are_named_when_their_layer_comes(tmp_path):
    folder, done = copy_checkpoint(tmp_path), []

    def spoil(a):
        a[1, 2] = np.nan
        return a

    rewrite_tensor(folder, "model.layers.1.mlp.up_proj.weight", spoil)
    source = pretrained.open_checkpoint(folder)
    is_refused(
        r"layers\.1\.mlp\.up_proj\.weight.*not finite",
        pretrained.stream,
        source,
        INPUTS,
        STATES,
        done=lambda s: done.append(s.layers),
    )
    assert done == [1]


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        ("layers.1.mlp.down_proj", 3e38, "hidden states of layer 1 are not finite: weights or inp"),
        ("", 0.0, "hidden states of layer 0 are all 0: check the weights"),
    ],
)
def test_weights_that_make_the_states_mean_nothing_are_said(names, value, message, tmp_path):
    """Weights of 1e37 gave NaN in every measure and exit code 0, zeros failed at the end."""
    folder = copy_checkpoint(tmp_path)
    for name in [name for name in open_weights(folder).names if names in name]:
        rewrite_tensor(folder, name, lambda a: np.full_like(a, value))
    source = pretrained.open_checkpoint(folder)
    is_refused(message, pretrained.stream, source, INPUTS, STATES)


@parametrize_refusals(
    [
        (np.ones((1, 21), int), "21 tokens are more than the 20 positions"),
        (np.full((1, 4), 40), "token id 40 is not below vocab_size=40"),
    ]
)
def test_tokens_beyond_the_positions_or_the_vocabulary(arguments, message):
    (x,) = arguments
    is_refused(
        message,
        lambda: pretrained.stream(
            pretrained.open_checkpoint(GOLDEN / "gpt2-head"), {"x": x}, {"all": Group(PROFILE)}
        ),
    )


def test_states_of_padding_may_be_infinite():
    """Rows are those of the examples of one part, in another order than that of the mask."""
    hidden = np.ones((2, 3, 4), np.float32)
    hidden[0, 0, 1] = hidden[1, 2, 3] = np.inf
    mask = np.array([[True, True, False], [True] * 3, [False, True, True]])
    streaming._check_states(1, hidden, mask, [2, 0])
    for rows in ([2, 1], [0, 2], [1, 0]):
        is_refused("of layer 1 are not finite", streaming._check_states, 1, hidden, mask, rows)
    is_refused("of layer 3 are not finite", streaming._check_states, 3, hidden, None, [2, 0])


def test_a_pass_that_does_not_cover_the_network_is_refused_and_layers_are_freed(monkeypatch):
    config = rc.transformer(1, 1, 4, cross_attention=True)
    source, freed = InMemory(draws.parameters(config), config), []
    monkeypatch.setattr(source.layers, "drop", lambda: freed.append(True), raising=False)
    inputs = {"x": np.ones((1, 3, 4), np.float32), "memory": np.ones((1, 2, 4), np.float32)}
    groups = {"short": Group((("short", TruncatedPass(0)),))}
    message = "truncated does not cover cross_attention=True"
    is_refused(message, pretrained.stream, source, inputs, groups)
    assert freed == [True]


def test_inputs_and_groups_that_do_not_fit():
    source = pretrained.open_checkpoint(GOLDEN / "gpt2-head")

    def check_refused(words, rows=3, *, chunk=8, **group):
        inputs = {"x": np.full((3, 4), 5), "mask": np.ones((rows, 4), bool)}
        groups = {"all": Group(PROFILE), "some": Group(PROFILE, **group)}
        is_refused(words, pretrained.stream, source, inputs, groups, chunk=chunk)

    check_refused("different lengths.*'x': 3, 'mask': 4", rows=4)
    check_refused("different lengths.*'x': 3, 'mask': 2", rows=2)
    check_refused("chunk=0 is not a whole number from 1 on", chunk=0)
    for spec, words in (
        (("SAN", "unheard"), "reading 'unheard' is not one of"),
        (("RNN", "published"), "ablation 'RNN' is not one of"),
    ):
        check_refused(words, ablation=AblationSpec(*spec))
    check_refused("group 'some' has none of 3 examples: first=3, last=None", first=3)
    check_refused("group 'some' has none of 3 examples: first=-1, last=2", first=-1, last=2)
    check_refused("group 'some' has none of 3 examples: first=2, last=2", first=2, last=2)
