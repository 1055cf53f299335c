"""rank_collapse.torch.record: models of many kinds of layers, and models that have no stack."""

import numpy as np
import pytest

from tests.support.refusals import is_refused

torch = pytest.importorskip("torch")

from rank_collapse.agree.recording import open_recording  # noqa: E402
from rank_collapse.torch import record  # noqa: E402
from tests.oracles.recorded_torch import IDS, Block, Model  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402


def test_layers_and_branches_by_name(tmp_path):
    model = Model()
    with record(model, tmp_path / "a.npz", layers=r"blocks\.[01]", mlp="nothing"):
        model(IDS)
    recording = open_recording(tmp_path / "a.npz")
    assert recording.num_layers == 2 and recording.branches == ("attention_branch",)


def test_lists_within_a_layer_are_no_layers(tmp_path):
    """The parts of an MLP and experts may be longer lists than that of the layers."""
    model = Model(depth=2)
    for block in model.blocks:
        block.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))
    for stack in (model, torch.nn.Sequential(model.embed, torch.nn.Sequential(*model.blocks))):
        with torch.no_grad(), record(stack, tmp_path / "a.npz"):
            stack(IDS)
        recording = open_recording(tmp_path / "a.npz")
        assert recording.num_layers == 2
        assert recording.branches == ("attention_branch", "mlp_branch")


class Odd(torch.nn.Module):
    """A stack whose layers do what a test says."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        for layer in self.layers[: None if self.turn == 1 else 1]:
            x = layer(x)
        return x


class Returns(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def record_odd(path, model, x, calls=1):
    with record(model, path):
        for _ in range(calls):
            model(x)


X = torch.ones(2, 3, 4)


SAME = Returns(lambda x: x + 1)


@pytest.mark.parametrize(
    ("layers", "x", "calls", "message"),
    [
        ((SAME, Returns(lambda x: None)), X, 1, "the output of layer layers.1 has no tensor of f"),
        ((SAME, Returns(lambda x: (3, x.long()))), X, 1, "the output of layer layers.1 has no"),
        ((Returns(lambda x: x.long()), SAME), X.long(), 1, "the input of layer layers.0 has no"),
        (
            (SAME, Returns(lambda x: x[..., :2])), X, 1,
            r"the stream has shape \[2, 3, 4\] before layer layers.0 and \[2, 3, 2\] after layer "
            "layers.1; layers= takes the layers of one stream",
        ),
        (
            (Returns(lambda x: x[:, :1]), SAME), X, 1,
            r"before layer layers.0 and \[2, 1, 4\] after layer layers.0",
        ),
        (
            (SAME,), X[None], 1,
            r"the input of layer layers.0 has shape \[1, 2, 3, 4\], not \[examples, tokens, width",
        ),
        (
            (SAME, Returns(lambda x: x)), X, 2,
            "one call of the model has the layers layers.0, layers.1, another layers.0$",
        ),
    ],
)  # fmt: skip
def test_layers_that_are_no_stack_are_refused(tmp_path, layers, x, calls, message):
    model = Odd(*layers)
    is_refused(message, record_odd, tmp_path / "a.npz", model, x, calls)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_stream_may_be_an_entry_of_what_a_layer_returns(tmp_path):
    stack = Odd(Returns(lambda x: {"ids": x.long(), "state": 2 * x}))
    with record(stack, tmp_path / "a.npz"):
        stack(X)
    (layer,) = open_recording(tmp_path / "a.npz").read_layers()
    np.testing.assert_array_equal(layer.after, 2 * X)
    stack = Odd(Returns(lambda x: [None, x.long(), 3 * x, x]))
    with record(stack, tmp_path / "a.npz"):
        stack(X)
    (layer,) = open_recording(tmp_path / "a.npz").read_layers()
    np.testing.assert_array_equal(layer.after, 3 * X)


def test_layers_that_change_the_stream_in_place_are_recorded_before_and_after(tmp_path):
    model = Odd(Returns(lambda x: x.add_(1)), Returns(lambda x: x.mul_(3)))
    with record(model, tmp_path / "a.npz"):
        model(X.clone())
    first, second = open_recording(tmp_path / "a.npz").read_layers()
    states = (first.before, first.after, second.before, second.after)
    assert [state[0, 0, 0] for state in states] == [1, 2, 2, 6]


def test_a_branch_of_other_size_is_not_recorded(tmp_path):
    """OPT computes its MLP of [b · n, d]: as large, and in the stream's shape afterwards."""

    class Layer(torch.nn.Module):
        def __init__(self, cut):
            super().__init__()
            self.mlp = Returns(lambda x: 0.5 * x.flatten(0, 1)[cut:])

        def forward(self, x):
            return x + self.mlp(x).sum()

    for cuts, names in (((0, 0), ("mlp_branch",)), ((1, 1), ()), ((0, 1), ())):
        model = Odd(*map(Layer, cuts))
        with record(model, tmp_path / "a.npz"):
            model(X)
        recording = open_recording(tmp_path / "a.npz")
        assert recording.branches == names
        if names:
            layers = list(recording.read_layers())
            np.testing.assert_array_equal(layers[0].branches["mlp_branch"], 0.5 * X)


def test_a_layer_that_is_called_twice_counts_twice(tmp_path):
    block = Block(8)
    model = torch.nn.Sequential(block, block)
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), record(model, tmp_path / "a.safetensors"):
        model(x)
    recording = open_recording(tmp_path / "a.safetensors")
    assert recording.num_layers == 2 and recording.metadata["layers"] == "0,0"
    layers = list(recording.read_layers())
    with torch.no_grad():
        assert_close(layers[1].after, block(block(x)), atol=1e-5)


def test_a_part_of_a_model_may_be_called_alone(tmp_path):
    model = Model()
    with torch.no_grad(), record(model, tmp_path / "a.npz"):
        for block in model.blocks:
            state = block(model.embed(IDS))
    recording = open_recording(tmp_path / "a.npz")
    assert recording.num_layers == 3 and "token_ids" not in recording.arrays
    np.testing.assert_array_equal(list(recording.read_layers())[-1].after, state)


def test_parts_of_a_layer_that_run_before_it_are_no_branches(tmp_path):
    """As where a model calls an attention of its own before the layers."""
    model = Model()
    with torch.no_grad(), record(model, tmp_path / "a.npz"):
        model.blocks[0].mlp(torch.ones(2, 3, 8))
        model(IDS)
    recording = open_recording(tmp_path / "a.npz")
    assert recording.branches == ("attention_branch", "mlp_branch")
