"""rank_collapse.torch.record: what is recorded is what the model computes, and nothing changes."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.refusals import is_refused

torch = pytest.importorskip("torch")

from rank_collapse.agree.comparison import compare_files  # noqa: E402
from rank_collapse.agree.recording import open_recording  # noqa: E402
from rank_collapse.torch import record  # noqa: E402
from rank_collapse.torch.recording import (  # noqa: E402
    find_branches,
    find_layers,
    find_part,
)
from tests.support.closeness import assert_close  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = torch.nn.LayerNorm(d)
        self.attn = torch.nn.MultiheadAttention(d, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(d, 8), torch.nn.GELU(), torch.nn.Linear(8, d)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, depth=3, d=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(10, d)
        self.blocks = torch.nn.ModuleList(Block(d) for _ in range(depth))

    def forward(self, ids, attention_mask=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = torch.arange(6).reshape(2, 3)


def test_states_and_branches_are_those_of_the_model(tmp_path):
    model = Model().eval()
    plain = model(IDS)
    with record(model, tmp_path / "a.safetensors"):
        recorded = model(IDS, attention_mask=torch.ones(2, 3, dtype=torch.long))
    assert torch.equal(plain, recorded)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    recording = open_recording(tmp_path / "a.safetensors")
    assert recording.num_layers == 3 and recording.shape == (2, 3, 8)
    assert recording.metadata["layers"] == "blocks.0,blocks.1,blocks.2"
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    x = model.embed(IDS)
    for block, layer in zip(model.blocks, recording.read_layers(), strict=True):
        np.testing.assert_array_equal(layer.before, x.detach())
        y = block.norm(x)
        attention = block.attn(y, y, y)[0]
        x = block(x)
        assert_close(layer.branches["attention_branch"], attention.detach(), atol=1e-6)
        total = layer.before + layer.branches["attention_branch"] + layer.branches["mlp_branch"]
        assert_close(total, x.detach(), atol=1e-6)


def make_block(*names):
    """Makes a layer of modules with these dotted names, in this order."""
    block = torch.nn.Module()
    for name in names:
        *outer, last = name.split(".")
        place = block
        for part in outer:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.add_module(last, torch.nn.Identity())
    return block


LAYERS_BY_LIBRARY = {
    "BERT": ("attention.self", "attention.output.dense", "output.dense"),
    "DistilBERT": ("attention.q_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
    "Llama": ("self_attn", "mlp"),
    "Falcon": ("self_attention", "mlp"),
    "GPT-2": ("attn", "mlp"),
    "GPT-NeoX": ("attention", "mlp"),
    "feed_forward": ("attention", "feed_forward"),
    "XLNet": ("mha", "ff"),
    "ffn": ("attn", "ffn"),
    "experts": ("self_attn", "moe"),
    "torch": ("self_attn", "linear1", "linear2"),
    "OPT": ("self_attn", "fc1", "fc2"),
    "ALBERT": ("attention", "ffn", "ffn_output"),
    "Mixtral": ("self_attn", "block_sparse_moe"),
    "RecurrentGemma": ("temporal_block", "mlp"),
    "T5": ("layer.0.SelfAttention", "layer.1.DenseReluDense"),
    "T5's decoder": ("layer.0.SelfAttention", "layer.1.Enc", "layer.2.DenseReluDense"),
}
BY_BRANCH = {"DistilBERT": (1, 3), "BERT": (1, 2), "ALBERT": (0, 1)}


@pytest.mark.parametrize("library", LAYERS_BY_LIBRARY)
def test_a_branch_is_the_module_of_a_whole_name(library):
    """Modules whose names only begin or end so, such as norms, come before it and after it."""
    names = LAYERS_BY_LIBRARY[library]
    chosen = BY_BRANCH.get(library, (0, -1))
    others = [f"{name.replace('.', '_')}_norm" for name in names]
    others += [f"pre_{name.replace('.', '_')}" for name in names]
    block = make_block(*others, *names, *(f"{name}.norm" for name in names))
    for branch, index in zip(("attention_branch", "mlp_branch"), chosen, strict=True):
        assert find_branches(block)[branch] is block.get_submodule(names[index])
    assert find_branches(make_block(*others)) == dict.fromkeys(("attention_branch", "mlp_branch"))


def test_patterns_are_tried_in_their_order():
    block = make_block("mlp", "attn", "first.attn")
    assert find_part(block, ["nothing", r"first\.attn", "mlp"]) is block.first.attn
    parts = find_branches(block, attention=r".*\.attn", mlp=["x", "attn"])
    assert parts == {"attention_branch": block.first.attn, "mlp_branch": block.attn}
    normed = ("post_attention_layernorm", "post_feedforward_layernorm")
    block = make_block("attn", "mlp", *normed)
    assert list(find_branches(block).values()) == [block.get_submodule(name) for name in normed]
    assert find_branches(block, attention="attn")["mlp_branch"] is block.mlp  # names that are given
    one = make_block("attn", "mlp", normed[0])
    assert find_branches(one) == {"attention_branch": one.attn, "mlp_branch": one.mlp}


def test_layers_are_those_of_a_whole_name_in_the_order_of_the_model():
    model = Model()
    model.blocks_norm = torch.nn.Identity()
    assert find_layers(model, r"blocks\.\d") == list(model.blocks)
    assert find_layers(model, "blocks") == [model.blocks]
    assert find_layers(model, [model.blocks[2], model.blocks[0]]) == [
        model.blocks[2],
        model.blocks[0],
    ]


def test_of_lists_of_one_length_the_larger_one_has_the_layers():
    model = torch.nn.Module()
    model.small = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    model.large = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    model.long = torch.nn.Sequential(torch.nn.Linear(9, 9), *[torch.nn.ReLU() for _ in range(9)])
    assert find_layers(model) == list(model.large)
    assert find_layers(model.long) == list(model.long)  # no other list


def test_bfloat16_is_kept(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "a.npz"):
        model(IDS)
    with record(model.bfloat16(), tmp_path / "b.npz"):
        model(IDS)
    answer = compare_files(tmp_path / "a.npz", tmp_path / "b.npz")
    assert answer.rounding.name == "bfloat16" and answer.agree


def test_calls_are_joined_along_the_tokens(tmp_path):
    model = Model()
    for block in model.blocks:  # without attention each token is on its own
        torch.nn.init.zeros_(block.attn.out_proj.weight)
    with record(model, tmp_path / "a.npz"):
        model(IDS)
    with record(model, tmp_path / "b.npz"):
        for token in range(3):
            model(IDS[:, token : token + 1])
    answer = compare_files(tmp_path / "a.npz", tmp_path / "b.npz")
    assert answer.agree


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


@pytest.mark.parametrize(
    ("of_attention", "of_mlp"),
    [
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
    ],
)
def test_a_branch_that_is_normed_is_what_is_added(tmp_path, of_attention, of_mlp):
    """In the layers of Gemma 2 and 3, OLMo 2 and GLM-4."""

    class NormedBlock(Block):
        def __init__(self, d):
            super().__init__(d)
            self.add_module(of_attention, torch.nn.RMSNorm(d))
            self.add_module(of_mlp, torch.nn.RMSNorm(d))

        def forward(self, x):
            x = x + getattr(self, of_attention)(self.attn(x, x, x)[0])
            return x + getattr(self, of_mlp)(self.mlp(x))

    model = Model()
    model.blocks = torch.nn.ModuleList(NormedBlock(8) for _ in range(2))
    with torch.no_grad(), record(model, tmp_path / "a.npz"):
        model(IDS)
    for layer in open_recording(tmp_path / "a.npz").read_layers():
        added = sum(layer.branches.values())
        assert_close(layer.before + added, layer.after, atol=1e-6)


def record_nothing(model, path, **options):
    with record(model, path, **options):
        pass


def test_what_cannot_be_recorded_is_one_line(tmp_path):
    path = tmp_path / "a.npz"
    is_refused("was not called", record_nothing, Model(), path)
    is_refused("has no list of modules", record_nothing, torch.nn.Linear(2, 2), path)
    is_refused("matches the name of no module", record_nothing, Model(), path, layers="x")
    is_refused("layers= is empty", record_nothing, Model(), path, layers=[])
    is_refused("not a module", record_nothing, Model(), path, layers=[1])

    def record_widths():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5))
        with record(model, path):
            model(torch.ones(1, 2, 4))

    is_refused("the stream has shape", record_widths)
    compiled = Model()
    compiled.blocks[1].compile(backend="eager")
    for model in (torch.compile(Model(), backend="eager"), compiled):
        is_refused("is compiled, and its graphs call no hooks", record_nothing, model, path)
    assert not path.exists()


def test_an_error_of_the_model_is_its_own_and_leaves_no_hook(tmp_path):
    model = Model()
    with pytest.raises(IndexError), record(model, tmp_path / "a.npz"):
        model(IDS + 100)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not (tmp_path / "a.npz").exists()


def test_sublayers_take_in_another_run(tmp_path):
    """Each adds to the stream of the other run what it makes of it."""
    first, second = Model().eval(), Model().eval()
    with torch.no_grad():
        for block in second.blocks:
            block.attn.out_proj.weight *= 1.3
            block.mlp[2].bias += 0.2
    with record(second, tmp_path / "b.npz"):
        second(IDS)
    with record(first, tmp_path / "a.safetensors", inputs=tmp_path / "b.npz"):
        first(IDS)
    replay, other = (open_recording(tmp_path / name) for name in ("a.safetensors", "b.npz"))
    assert replay.metadata["inputs"] == "b.npz"
    layers = zip(first.blocks, replay.read_layers(), other.read_layers(), strict=True)
    for block, a, b in layers:
        y = block.norm(torch.tensor(b.before, dtype=torch.float32))
        attention = block.attn(y, y, y)[0].detach()
        assert_close(a.branches["attention_branch"], attention, atol=1e-6)
        middle = torch.tensor(b.before + b.branches["attention_branch"], dtype=torch.float32)
        mlp = block.mlp(block.norm(middle)).detach()
        assert_close(a.branches["mlp_branch"], mlp, atol=1e-6)
        assert_close(a.after, b.after, atol=1e-5)
    answer = compare_files(tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert answer.first == {"layer": 0, "part": "attention"} and not answer.agree


def test_noise_on_other_inputs(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "b.npz"):
        model(IDS)
    for name, noise, seed in (("0", 0.0, 0), ("1", 1e-3, 0), ("2", 1e-3, 1), ("3", 2e-3, 0)):
        path = tmp_path / f"{name}.safetensors"
        with record(model, path, inputs=tmp_path / "b.npz", noise=noise, seed=seed):
            model(IDS)
    still, *noisy = (
        list(open_recording(tmp_path / f"{k}.safetensors").read_layers()) for k in "0123"
    )
    for branch in ("attention_branch", "mlp_branch"):
        changes = [run[1].branches[branch] - still[1].branches[branch] for run in noisy]
        sizes = [np.linalg.norm(change) for change in changes]
        assert sizes[0] > 0 and np.linalg.norm(changes[0] - changes[1]) > 0.3 * sizes[0]
        np.testing.assert_allclose(sizes[2], 2 * sizes[0], rtol=0.02)


def test_steps_take_in_another_run(tmp_path):
    """Calls with some of the tokens each take in their states."""
    model = Model().eval()
    with record(model, tmp_path / "b.npz"):
        model(IDS)
    model.blocks[1].mlp[2].bias.data += 0.5
    with record(model, tmp_path / "a.safetensors", inputs=tmp_path / "b.npz"):
        for token in range(3):
            model(IDS[:, token : token + 1])
    answer = list(open_recording(tmp_path / "a.safetensors").read_layers())
    for a, b in zip(answer, open_recording(tmp_path / "b.npz").read_layers(), strict=True):
        change = a.branches["mlp_branch"] - b.branches["mlp_branch"]
        assert_close(change, 0.5 * (a.index == 1), atol=1e-5)


def test_inputs_that_do_not_fit_are_one_line(tmp_path):
    model = Model().eval()
    with record(model, tmp_path / "b.safetensors"):
        model(IDS, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))

    def record_on(model, ids, **arguments):
        path = tmp_path / "c.safetensors"
        with record(model, path, inputs=tmp_path / "b.safetensors"):
            model(ids, **arguments)

    is_refused("2 examples of 3 tokens", record_on, model, torch.arange(8).reshape(2, 4))
    is_refused("2 examples of 3 tokens", record_on, model, IDS[:1])
    is_refused("the model computed 2", record_on, model, IDS[:, :2])
    is_refused("has 3 layers, and the model has more", record_on, Model(4).eval(), IDS)
    is_refused("has 3 layers, and the model has 2", record_on, Model(2).eval(), IDS)
    mask = torch.ones(2, 3, dtype=torch.long)
    is_refused("another mask", record_on, model, IDS, attention_mask=mask)
    is_refused("width 8", record_on, Model(3, 6).eval(), IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class WithLogits(Model):
    """Returns an object with logits, as models of transformers do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, input_ids=None, attention_mask=None, mask=None, inputs_embeds=None, **others):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.head(x))


def record_calls(path, calls, model=None):
    model = model or WithLogits().eval()
    with torch.no_grad(), record(model, path):
        outputs = [model(*args, **keywords) for args, keywords in calls]
    return outputs, open_recording(path)


def test_ids_masks_and_logits_are_recorded_by_name(tmp_path):
    """The ids are those named so, and no positions; the mask is no other matrix."""
    mask, positions = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.arange(3).expand(2, 3)
    keywords = {"position_ids": positions, "attention_mask": mask, "input_ids": IDS}
    (output,), recording = record_calls(tmp_path / "a.safetensors", [((), keywords)])
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    np.testing.assert_array_equal(recording.read_mask(), mask)
    np.testing.assert_array_equal(recording.read_logits(), output.logits)
    assert recording.metadata == {
        "torch": torch.__version__,
        "model": "WithLogits",
        "layers": "blocks.0,blocks.1,blocks.2",
    }
    _, recording = record_calls(tmp_path / "b.safetensors", [((IDS,), {"mask": mask.bool()})])
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    np.testing.assert_array_equal(recording.read_mask(), mask)


def test_what_has_other_axes_is_not_recorded(tmp_path):
    """Ids of embeddings, masks of pairs, logits of examples."""
    embedded = WithLogits().embed(IDS).detach()
    options = {"inputs_embeds": embedded, "attention_mask": torch.ones(2, 1, 3, 3)}
    options |= {"labels": torch.arange(2), "flags": torch.ones(2, 3, dtype=torch.bool)}
    _, recording = record_calls(tmp_path / "a.safetensors", [((), options)])
    assert recording.arrays.keys() == {"residual", "attention_branch", "mlp_branch", "logits"}
    model = Model()
    with torch.no_grad(), record(model, tmp_path / "b.safetensors"):
        model(IDS)  # a tensor, no logits
    assert "logits" not in open_recording(tmp_path / "b.safetensors").arrays


def test_steps_are_joined_with_their_ids_logits_and_the_last_mask(tmp_path):
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    calls = [
        ((IDS[:, :2],), {"attention_mask": mask[:, :2]}),
        ((IDS[:, 2:],), {"attention_mask": mask}),
    ]
    outputs, recording = record_calls(tmp_path / "a.safetensors", calls)
    np.testing.assert_array_equal(recording.read_token_ids(), IDS)
    np.testing.assert_array_equal(recording.read_mask(), mask)
    expected = torch.cat([output.logits for output in outputs], dim=1)
    np.testing.assert_array_equal(recording.read_logits(), expected)
    assert recording.shape == (2, 3, 8)


def test_one_example_without_an_axis(tmp_path):
    outputs, recording = record_calls(tmp_path / "a.safetensors", [((IDS[0],), {})])
    assert recording.shape == (1, 3, 8) and outputs[0].logits.ndim == 2
    np.testing.assert_array_equal(recording.read_token_ids(), IDS[:1])
    assert "logits" not in recording.arrays


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

    for cut, names in ((0, ("mlp_branch",)), (1, ())):
        model = Odd(Layer(cut), Layer(cut))
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
