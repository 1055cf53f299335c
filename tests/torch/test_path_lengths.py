"""`path_lengths` of PyTorch's own modules: results, and what stays untouched."""

import copy
import itertools
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from rank_collapse.torch import path_lengths  # noqa: E402
from rank_collapse.torch.path_lengths import _split_longer  # noqa: E402
from rank_collapse.torch.scopes import Branch, Branches  # noqa: E402
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


def split_exactly(model, x, branches):
    """Returns Σ_k t^k J_k x by reverse mode, its coefficients found at several t."""
    modules = [m for name, m in model.named_modules() if name in branches]
    points = torch.linspace(-1, 1, len(modules) + 1, dtype=x.dtype)
    values = []
    for t in points:

        def scale(module, inputs, output, t=t):
            first = output[0] if isinstance(output, tuple) else output
            scaled = first.detach() + t * (first - first.detach())
            return (scaled, *output[1:]) if isinstance(output, tuple) else scaled

        hooks = [m.register_forward_hook(scale) for m in modules]
        jacobian = torch.autograd.functional.jacobian(model, x)
        for hook in hooks:
            hook.remove()
        values.append(jacobian.flatten(x.ndim).flatten(0, -2) @ x.flatten())
    powers = torch.linalg.inv(torch.vander(points, increasing=True))
    return (powers @ torch.stack(values)).view(-1, *x.shape)


@pytest.mark.full
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    attentions = r"layers\.\d+\.self_attn"
    frozen = path_lengths(encoder, HIDDEN, branches=attentions)
    torch.testing.assert_close(frozen.output, encoder(HIDDEN))
    torch.testing.assert_close(frozen.by_length.sum(0) + frozen.offset, frozen.output)
    exact = path_lengths(encoder, HIDDEN, branches=attentions, freeze=False)
    names = {f"layers.{i}.self_attn" for i in range(2)}
    torch.testing.assert_close(exact.by_length, split_exactly(encoder, HIDDEN, names))
    assert not torch.allclose(exact.by_length, frozen.by_length, atol=1e-3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


@torch.no_grad()
def test_multihead_attention():
    torch.manual_seed(0)
    block = Block().double().eval()
    contributions = path_lengths(block, HIDDEN, branches="attention")
    attention = block.attention
    _, weights = attention(HIDDEN, HIDDEN, HIDDEN, average_attn_weights=False)
    values = (HIDDEN @ attention.in_proj_weight[2 * D :].T).view(1, N, 2, D // 2).transpose(1, 2)
    heads = (weights @ values).transpose(1, 2).reshape(1, N, D)
    torch.testing.assert_close(contributions.by_length[0], HIDDEN)
    torch.testing.assert_close(contributions.by_length[1], heads @ attention.out_proj.weight.T)
    with pytest.raises(ValueError, match=r"matches attention.out_proj, whose forward is not call"):
        path_lengths(block, HIDDEN, branches=r"attention\.out_proj")


@pytest.mark.full
@torch.no_grad()
def test_start_longest_direction_and_output(model):
    whole = path_lengths(model, IDS, branches=LAYERS, start="embed")
    assert whole.output_name == "last_hidden_state" and whole.longer is None
    from_state = path_lengths(model, hidden=model.embed(IDS), branches=LAYERS)
    assert from_state.start == "hidden" and list(whole) == [whole.by_length, whole.offset]
    torch.testing.assert_close(from_state.by_length, whole.by_length)
    dropped = path_lengths(model, IDS, branches=LAYERS, start="drop")
    torch.testing.assert_close(dropped.by_length, whole.by_length)

    short = path_lengths(model, IDS, branches=LAYERS, start="embed", longest=1)
    torch.testing.assert_close(short.by_length, whole.by_length[:2])
    torch.testing.assert_close(short.longer, whole.by_length[2])
    torch.testing.assert_close(short.offset, whole.offset)
    long = path_lengths(model, IDS, branches=LAYERS, start="embed", longest=4)
    assert long.by_length.shape[0] == 5 and long.longer is None and not long.by_length[3:].any()

    later = path_lengths(model, IDS, branches=LAYERS, start="layers.0")
    assert later.by_length.shape[0] == 2 and not later.by_length.isnan().any()
    direction = torch.randn(1, N, D)  # of another dtype than the state
    exact = path_lengths(
        model, hidden=HIDDEN, branches=LAYERS, direction=direction, freeze=False, output="first"
    )
    step = 1e-6 * direction.double()
    ends = [model(hidden=HIDDEN + sign * step)["first"] for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close(exact.by_length.sum(0), expected, atol=1e-8, rtol=1e-6)


@pytest.mark.full
@torch.no_grad()
def test_axes_shared_modules_and_branches_inside_each_other(model):
    axes = {"first": r"layers\.0", "second": r"layers\.1"}
    apart = path_lengths(model, hidden=HIDDEN, branches=axes)
    both = path_lengths(model, hidden=HIDDEN, branches=LAYERS)
    assert apart.by_length.shape[:2] == (2, 2)
    torch.testing.assert_close(apart.by_length[1, 0] + apart.by_length[0, 1], both.by_length[1])
    nested = path_lengths(model, hidden=HIDDEN, branches=r"layers\.\d+(\.v)?")
    torch.testing.assert_close(nested.by_length, both.by_length)

    shared = copy.deepcopy(model)
    shared.layers = nn.ModuleList([shared.layers[0]] * 2)
    matched = Branches(shared, r"layers\.1")  # the other path of the same module
    node = torch.fx.Graph().placeholder("x")
    node.meta = {"nn_module_stack": {"call": ("model.layers.0", None)}}
    assert matched.find(node) == Branch("call", 0)
    twice = copy.deepcopy(model)
    twice.layers[1].load_state_dict(twice.layers[0].state_dict())
    torch.testing.assert_close(
        path_lengths(shared, hidden=HIDDEN, branches=LAYERS).by_length,
        path_lengths(twice, hidden=HIDDEN, branches=LAYERS).by_length,
    )


class Counting(Model):
    """Assigns attributes in its forward pass, tensors among them."""

    def forward(self, ids=None, hidden=None):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(ids, hidden)


def test_the_model_and_torch_stay_as_they_were():
    torch.manual_seed(0)
    model = Counting()
    before = copy.deepcopy(model.state_dict())
    attributes = [dict(vars(m)) for m in model.modules()]
    backends = torch.backends.cuda
    settings = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled())
    assert path_lengths(model, IDS, branches=LAYERS, start="embed").by_length.shape[0] == 3
    with pytest.raises(ValueError, match=r"torch\.export fails"):
        path_lengths(model, hidden=HIDDEN[..., :3], branches=LAYERS)
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert settings == (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled())
    assert torch.is_grad_enabled() and not model.training


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bfloat16_and_a_compiled_model(model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    contributions = path_lengths(half, hidden=HIDDEN.bfloat16(), branches=LAYERS)
    exact = path_lengths(model, hidden=HIDDEN, branches=LAYERS)
    assert contributions.by_length.dtype == torch.bfloat16
    torch.testing.assert_close(
        contributions.by_length.double(), exact.by_length, atol=0.05, rtol=0.05
    )
    compiled = path_lengths(torch.compile(model), hidden=HIDDEN, branches=LAYERS)
    torch.testing.assert_close(compiled.by_length, exact.by_length)


@pytest.mark.full
def test_jax_is_not_imported():
    code = "import sys, rank_collapse.torch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Detached(Linear):
    def weigh(self, scores):
        return scores.detach()


class Features(Attention):
    def forward(self, x):
        q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
        sums = k.sum(-2, keepdim=True)
        return q @ (k.transpose(-1, -2) @ self.v(x)) / (q * sums).sum(-1, keepdim=True)


@pytest.mark.full
def test_modules_inside_that_are_compiled(model):
    want = path_lengths(model, hidden=HIDDEN, branches=LAYERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch itself imports
        model.layers[0] = wrapper = torch.compile(model.layers[0])
    paths = path_lengths(model, hidden=HIDDEN, branches=LAYERS)
    torch.testing.assert_close(paths.by_length, want.by_length)
    assert model.layers[0] is wrapper


@pytest.mark.full
@torch.no_grad()
def test_attention_without_a_softmax():
    torch.manual_seed(0)
    model = Model(Features)
    frozen = path_lengths(model, hidden=HIDDEN, branches=LAYERS)
    state, linear = HIDDEN, []
    for layer in model.layers:
        q, k = F.elu(layer.q(state)) + 1, F.elu(layer.k(state)) + 1
        weights = q @ k.transpose(-1, -2)
        weights = weights / weights.sum(-1, keepdim=True)
        linear.append(lambda t, a=weights, w=layer.v.weight: a @ (t @ w.T))
        state = state + layer(state)
    scale = (state.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    path = linear[1](linear[0](HIDDEN))
    torch.testing.assert_close(frozen.by_length[2], (path - path.mean(-1, keepdim=True)) * scale)
    assert path_lengths(Model(Detached), hidden=HIDDEN, branches=LAYERS).longer is None


@pytest.mark.parametrize("longest", [0, 1, 2, 4])
@pytest.mark.parametrize("sizes", [(3,), (3, 2), (2, 4), (1, 1)])
def test_longer_paths_are_one_sum_whatever_the_number_of_axes(longest, sizes):
    """Against a loop over the lengths of each axis."""
    random = torch.Generator().manual_seed(0)
    sums = torch.randn((*sizes, 5, 2), generator=random, dtype=torch.float64)
    expected = torch.zeros((*[longest + 1] * len(sizes), 5, 2), dtype=torch.float64)
    longer = torch.zeros(5, 2, dtype=torch.float64)
    for lengths in itertools.product(*map(range, sizes)):
        if max(lengths) <= longest:
            expected[lengths] += sums[lengths]
        else:
            longer += sums[lengths]
    by_length, remaining = _split_longer(sums, len(sizes), longest)
    torch.testing.assert_close(by_length, expected)
    if max(sizes) <= longest + 1:
        assert remaining is None
    else:
        torch.testing.assert_close(remaining, longer)


def shift(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def double_last(x):
    y = x.clone()
    y[:, -2:-1] = 2 * x[:, -2:-1]
    y[..., ::3] = 3 * y[..., ::3]
    return y


def pad_circularly(x):
    return F.pad(x.transpose(1, 2), (1, 1), mode="circular").transpose(1, 2)


def change_after_a_view(x):
    y = x.clone()
    view = y.transpose(1, 2)
    y *= 2
    return view.transpose(1, 2)


@pytest.mark.parametrize("change", [shift, double_last, pad_circularly, change_after_a_view])
@pytest.mark.parametrize("freeze", [False, True])
def test_slices_and_views_of_what_is_changed_in_place(change, freeze):
    """Two linear branches B and C, with a linear map M by changes in place between them, have the
    sums M x, M B x + C M x and C M B x."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

        def forward(self, x):
            return x @ self.weight

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.c = Linear(), Linear()

        def forward(self, x):
            x = change(x + self.b(x))
            return x + self.c(x)

    model, x = Changing(), torch.randn(2, 5, 4, dtype=torch.float64)
    paths = path_lengths(model, x, branches="[bc]", freeze=freeze)
    short, long = change(x), change(model.b(x))
    sums = torch.stack([short, long + model.c(short), model.c(long)]).detach()
    torch.testing.assert_close(paths.by_length, sums, rtol=1e-10, atol=1e-12)
