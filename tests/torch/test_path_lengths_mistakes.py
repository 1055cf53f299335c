"""Wrong uses of path_lengths get one line."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from rank_collapse.torch import path_lengths  # noqa: E402
from tests.oracles.small_torch_stack import (  # noqa: E402
    HIDDEN,
    IDS,
    LAYERS,
    Attention,
    D,
    Linear,
    Model,
    N,
)
from tests.support.kept_messages import check_error  # noqa: E402


class Branching(Attention):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Comparing(Attention):
    def forward(self, x):
        return x if torch.equal(x, x.flip(1)) else super().forward(x)


class Unfrozen(Attention):
    def forward(self, x):
        return x.cumprod(1)


class Underived(Attention):
    def forward(self, x):
        return torch.cdist(x, x, p=1.0) @ x.detach()


class Bilinear(Attention):
    def forward(self, x):
        return self.q(x) * self.v(x)


class Rectified(Attention):
    """A product of two states behind a non-linear function, which is no attention weight."""

    def forward(self, x):
        return self.k(F.relu(self.q(x) * self.v(x)))


class Batched(Attention):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(N)

    def forward(self, x):
        return self.norm(super().forward(x))


STATES, CAUSAL = torch.randn(2, N, 8), nn.Transformer.generate_square_subsequent_mask(N)
DECODER = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1).eval()
ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
).eval()
WHOLE = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
WRONG = {
    "no module": ({"model": lambda x: x}, "model is a function, not a torch.nn.Module"),
    "no match": (
        {"branches": "layer"},
        r"='layer' matches .* nearest are layers, layers\\",
    ),
    "the model itself": ({"branches": ""}, "branches='' matches no module's path in full"),
    "no pattern": ({"branches": "(["}, r"branches='\(\[' is not a regular expression: "),
    "no dict": ({"branches": 3}, r"branches=3 is neither a regular expression .* nor a dict"),
    "empty": ({"branches": {}}, "branches={} is neither"),
    "number in dict": ({"branches": {"mlp": 3}}, r"branches\['mlp'\]=3 is not a regular"),
    "two axes": (
        {"branches": {"a": LAYERS, "b": r"layers\.1"}},
        r"branches: module 'layers.1' matches several patterns",
    ),
    "no match in a dict": (
        {"branches": {"mlp": LAYERS, "attention": "layer"}},
        r"branches\['attention'\]='layer' matches no module's path in full; the nearest are laye",
    ),
    "no start": ({"start": "embedding"}, r"start='embedding' is neither .* near it: embed"),
    "unused module": ({"start": "unused"}, "start='unused': this module computes nothing"),
    "ids": (
        {"inputs": (IDS,), "kwargs": {}, "start": "ids"},
        r"start='ids' is an argument of torch.int64, .* such as 'embed'",
    ),
    "ids alone": (
        {"inputs": (IDS,), "kwargs": {}},
        "start=None: no argument of floating point; name one with start=, such as 'embed'",
    ),
    "two states": (
        {"kwargs": {"hidden": HIDDEN, "scale": HIDDEN + 1}},
        "start=None: several arguments of floating point; .* 'hidden', 'scale'",
    ),
    "unknown argument": (
        {"kwargs": {"hidden": HIDDEN, "mask": None}},
        "Model.forward: got an unexpected keyword argument 'mask'",
    ),
    "no output": ({"output": "logits"}, r"output='logits' is not one .*'last_hidden_state'"),
    "integer output": ({"output": "count"}, r"output='count' is not one of the tensors it returns"),
    "longest": ({"longest": -1}, "longest=-1"),
    "direction": ({"direction": HIDDEN[:, :2]}, r"direction has the shape \(1, 2, 8\), .* \(1, 5,"),
    "direction in words": ({"direction": "x"}, "direction is str, but must be a tensor of floats"),
    "whole direction": (
        {"direction": torch.ones(1, 5, 8, dtype=torch.int64)},
        "direction is torch.int64, but must be a tensor of floats",
    ),
    "freeze": ({"freeze": "no"}, "freeze='no' is not True or False"),
    "other numbers": (
        {"model": nn.Sequential(nn.Linear(D, D)), "inputs": (HIDDEN,), "kwargs": {}}
        | {"branches": "0"},
        r"aten.\w+ in module '0' .* fails on these inputs: .* same dtype, .* Double and Float",
    ),
    "frozen alone": (
        {"model": Model().layers[0], "kwargs": {"x": HIDDEN}, "branches": "k", "start": "k"},
        "no path leads from start='k' to",
    ),
    "dropout": (
        {"model": Model().train()},
        r"in module 'drop' .* draws random numbers, .*model.eval\(\)",
    ),
    "batch statistics": (
        {
            "model": nn.Sequential(Batched().double().train()),
            "inputs": (HIDDEN,),
            "kwargs": {},
            "branches": "0",
        },
        r"in module '0.norm' .*model.eval\(\)",
    ),
    "wrong width": (
        {"kwargs": {"hidden": HIDDEN[..., :3]}},
        r"torch.export fails in layers.0.q \(linear.py:\d+\): RuntimeError: .*",
    ),
    "branching": (
        {"model": Model(Branching)},
        r"torch.export fails in layers.0 .*branches on values of a tensor",
    ),
    "comparing": (
        {"model": Model(Comparing)},
        r"fails in layers.0 .*: DataDependentOutputException: .*branches on values of a tensor",
    ),
    "causal mask of a decoder": (
        {"model": DECODER, "inputs": (STATES, STATES), "kwargs": {"tgt_mask": CAUSAL}}
        | {"branches": r"layers\.0\.self_attn", "start": "tgt"},
        "torch.export fails in the model: PyTorch reads the mask to see whether it is causal; give "
        "tgt_is_causal=True if it is, else tgt_is_causal=False",
    ),
    "causal mask of an encoder": (
        {"model": ENCODER, "inputs": (STATES,), "kwargs": {"mask": CAUSAL}}
        | {"branches": r"layers\.0\.self_attn", "start": "src"},
        "give is_causal=True if it is, else is_causal=False",
    ),
    "causal mask of an encoder and a decoder": (
        {"model": WHOLE, "inputs": (STATES, STATES), "kwargs": {"src_mask": CAUSAL}}
        | {"branches": r"encoder\.layers\.0\.self_attn", "start": "src"},
        "give src_is_causal=True if it is, else src_is_causal=False",
    ),
    "linear attention": (
        {"model": Model(Linear)},
        r"aten.bmm in module 'layers.0' .* multiplies two values .*\.detach\(\)",
    ),
    "bilinear": (
        {"model": Model(Bilinear)},
        r"aten.mul in module 'layers.0' \(\w+.py:\d+: return self.q",
    ),
    "bilinear, rectified": (
        {"model": Model(Rectified)},
        r"aten.mul in module 'layers.0' .* multiplies two values .*\.detach\(\)",
    ),
    "no rule": (
        {"model": Model(Unfrozen)},
        r"aten.cumprod in module 'layers.0' .* no rule says how to freeze it",
    ),
    "no numbers": (
        {"model": Model().to("meta")},
        "embed.weight is on the device meta and has no numbers: load the weights",
    ),
    "no derivative": (
        {"model": Model(Underived), "freeze": False},
        r"aten._cdist_forward in module 'layers.0' .* has no derivative in forward mode of torch",
    ),
    "identity": (
        {"model": nn.Sequential(nn.Identity(), nn.Linear(D, D)), "branches": "0"},
        "branches matches '0', an nn.Identity",
    ),
    "no tensor": (
        {"model": nn.Flatten(), "inputs": (IDS,), "kwargs": {}, "branches": "x"},
        "branches='x' matches no module's path in full; .* the model has no modules",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_get_one_line(name, model, capfd):
    changes, line = WRONG[name]
    arguments = {
        "model": model,
        "inputs": (),
        "kwargs": {"hidden": HIDDEN},
        "branches": LAYERS,
    } | changes
    inputs, kwargs = arguments.pop("inputs"), arguments.pop("kwargs")
    model = arguments.pop("model")
    with pytest.raises(ValueError, match=line) as error:
        path_lengths(model, *inputs, **arguments, **kwargs)
    assert "\n" not in str(error.value) and not any(capfd.readouterr())
    if ".py:" not in str(error.value):  # no line of code, which changes
        check_error(error)


def test_a_model_of_several_processes_is_refused(model, tmp_path):
    """The message names the module inside, and that module is measured."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match=r"DistributedDataParallel: .*, model\.module,"):
            path_lengths(wrapped, hidden=HIDDEN, branches="module." + LAYERS)
        with pytest.raises(ValueError, match=r"DistributedDataParallel: .* inside, 0\.module,"):
            path_lengths(nn.Sequential(wrapped), HIDDEN, branches="0")
        lengths = path_lengths(wrapped.module, hidden=HIDDEN, branches=LAYERS)
        linear = nn.Sequential(nn.Linear(D, D)).double()
        expected = linear(HIDDEN[0]).detach()
        sharded = fully_shard(linear, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"0\.weight is a DTensor, .* of one process"):
            path_lengths(sharded, HIDDEN[0], branches="0")
        torch.testing.assert_close(sharded(HIDDEN[0]), expected)  # it runs as before
    finally:
        torch.distributed.destroy_process_group()
    sums = lengths.by_length.sum(0) + lengths.offset
    expected = model(hidden=HIDDEN)[lengths.output_name].detach()
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("hint", [True, False])
def test_a_causal_mask_with_its_hint_is_measured(hint):
    """The cure that the message names: the split of the output is whole."""
    lengths = path_lengths(
        DECODER, STATES, STATES, tgt_mask=CAUSAL, tgt_is_causal=hint, branches=".*self_attn",
        start="tgt",
    )  # fmt: skip
    expected = DECODER(STATES, STATES, tgt_mask=CAUSAL)
    torch.testing.assert_close(lengths.output, expected)
    torch.testing.assert_close(lengths.by_length.sum(0) + lengths.offset, expected)
