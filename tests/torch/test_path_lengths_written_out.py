"""`path_lengths` of networks whose gates, norms and softmax are written out, path by path."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from rank_collapse.torch import path_lengths  # noqa: E402

D, N, F_WIDTH = 8, 5, 16
BRANCHES = {"attention": r"attention\.\d+", "mlp": r"mlp\.\d+"}
MASK = torch.triu(torch.ones(N, N, dtype=torch.bool), 1)


def tanh_gelu(h):
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))


def in_halves(h):
    return torch.cat([F.gelu(half) for half in h.chunk(2, -1)], -1)


def in_place(h):
    return F.relu_(h.clone()).mul_(2.0)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu by tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu by tanh, written out": tanh_gelu,
    "gelu, written out": lambda h: h * 0.5 * (1 + torch.erf(h / math.sqrt(2))),
    "silu": F.silu,
    "silu as a quotient": lambda u: u / (1 + torch.exp(-u)),
    "silu as a product": lambda u: u * (1 / (1 + torch.exp(-u))),
    "silu in float32": lambda h: F.silu(h.float()).double(),
    "quick gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "relu": F.relu,
    "relu as a comparison": lambda h: h * (h > 0),
    "relu as a maximum": lambda h: torch.maximum(h, torch.zeros(())),
    "relu in place": in_place,
    "squared relu": lambda h: F.relu(h) ** 2,
    "squared relu, square": lambda h: F.relu(h).square(),
    "leaky relu by where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "leaky relu as a maximum": lambda h: torch.maximum(h, 0.1 * h),
    "square": lambda h: h * h,
    "cube": lambda h: h**3,
    "first power": lambda h: h**1.0,
    "tanh": torch.tanh,
    "mish": F.mish,
    "mish, written out": lambda h: h * torch.tanh(torch.log1p(torch.exp(h))),
    "elu": F.elu,
    "elu by where": lambda h: torch.where(h > 0, h, torch.exp(h) - 1),
    "hardswish, written out": lambda h: h * F.relu6(h + 3) / 6,
    "softplus": F.softplus,
    "softplus, written out": lambda h: torch.log(1 + torch.exp(h)),
    "softsign": F.softsign,
    "hardtanh": F.hardtanh,
    "clamped silu": lambda h: F.silu(h).clamp(-1, 1),
    "sigmoid, written out": lambda u: 1 / (1 + torch.exp(-u)),
    "snake": lambda h: h + torch.sin(h) ** 2,
    "tanh times sigmoid": lambda h: torch.tanh(h) * torch.sigmoid(h),
    "h times |h|": lambda h: h * h.abs(),
    "masked gelu": lambda h: F.gelu(h).masked_fill(torch.arange(F_WIDTH) % 3 == 0, 0.0),
    "gelu in halves": in_halves,
}


def softmax_by_hand(scores):
    scores = torch.where(MASK, torch.finfo(scores.dtype).min, scores)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def softmax_with_sink(scores):
    sink = torch.full((*scores.shape[:-1], 1), 0.3, dtype=scores.dtype)
    scores = torch.cat([scores.masked_fill(MASK, -math.inf), sink], -1)
    return scores.softmax(-1)[..., :-1]


SOFTMAXES = {
    "softmax": lambda scores: scores.masked_fill(MASK, -math.inf).softmax(-1),
    "by hand": softmax_by_hand,
    "soft cap": lambda s: (3 * torch.tanh(s / 3)).masked_fill(MASK, -1e30).softmax(-1),
    "sink": softmax_with_sink,
    "squared relu": lambda scores: F.relu(scores.masked_fill(MASK, 0)) ** 2 / N,
    "float32": lambda s: (s + MASK * -1e9).float().softmax(-1).double(),
}


class HandNorm(nn.Module):
    """A root-mean-square norm; `scale` says how its statistic is written."""

    SCALES = {
        "rsqrt": lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        "reciprocal": lambda x: 1 / (torch.sqrt((x * x).mean(-1, keepdim=True)) + 1e-6),
        "norm": lambda x: D**0.5 / x.norm(dim=-1, keepdim=True).clamp_min(1e-8),
        "power": lambda x: (x**2).mean(-1, keepdim=True).add(1e-6) ** -0.5,
        "float32": lambda x: x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().double(),
    }

    def __init__(self, kind="rsqrt"):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(D)), kind

    def scale(self, x):
        return self.SCALES[self.kind](x)

    def forward(self, x):
        if self.kind == "reciprocal":
            return x / (torch.sqrt((x * x).mean(-1, keepdim=True)) + 1e-6) * self.weight
        if self.kind == "norm":
            return F.normalize(x, dim=-1, eps=1e-8) * D**0.5 * self.weight
        return self.weight * (x * self.scale(x))

    def linear(self, x, t):
        return t * self.scale(x) * self.weight


class LayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(D)

    def linear(self, x, t):
        scale = (x.var(-1, correction=0, keepdim=True) + self.eps).rsqrt()
        return (t - t.mean(-1, keepdim=True)) * scale * self.weight


class Attention(nn.Module):
    def __init__(self, softmax):
        super().__init__()
        self.qkv, self.out, self.softmax = nn.Linear(D, 3 * D), nn.Linear(D, D), softmax

    def split(self, x):
        return (t.view(1, N, 2, D // 2).transpose(1, 2) for t in x.chunk(3, -1))

    def weights(self, x):
        q, k, _ = self.split(self.qkv(x))
        return self.softmax(q @ k.transpose(-1, -2) / math.sqrt(D // 2))

    def forward(self, x):
        *_, v = self.split(self.qkv(x))
        return self.out((self.weights(x) @ v).transpose(1, 2).reshape(1, N, D))

    def linear(self, x, t):
        *_, v = self.split(t @ self.qkv.weight.T)
        return (self.weights(x) @ v).transpose(1, 2).reshape(1, N, D) @ self.out.weight.T


class MLP(nn.Module):
    def __init__(self, activation, is_gated):
        super().__init__()
        self.w_in, self.w_out = nn.Linear(D, F_WIDTH), nn.Linear(F_WIDTH, D)
        self.w_gate = nn.Linear(D, F_WIDTH) if is_gated else None
        self.activation = activation

    def forward(self, x):
        if self.w_gate is None:
            return self.w_out(self.activation(self.w_in(x)))
        return self.w_out(self.activation(self.w_gate(x)) * self.w_in(x))

    def linear(self, x, t):
        if self.w_gate is None:
            h = self.w_in(x)
            gate = self.activation(h) / h
        else:
            gate = self.activation(self.w_gate(x))
        return (t @ self.w_in.weight.T * gate) @ self.w_out.weight.T


class Network(nn.Module):
    """Norms before attentions and MLPs; the parts of layer l are the l-th of each list."""

    def __init__(self, *, activations=(F.gelu,), softmaxes=None, norms=(LayerNorm,), gated=False):
        super().__init__()
        softmaxes = softmaxes or [SOFTMAXES["softmax"]]
        depth = max(len(activations), len(softmaxes), len(norms), 2)
        pick = [lambda parts, i=i: parts[i % len(parts)] for i in range(depth)]
        self.attention = nn.ModuleList(Attention(p(softmaxes)) for p in pick)
        self.mlp = nn.ModuleList(MLP(p(activations), gated) for p in pick)
        self.norms = nn.ModuleList(pick[i % depth](norms)() for i in range(2 * depth))
        generator = torch.Generator().manual_seed(0)
        for p in self.double().eval().parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.4

    def branches(self):
        pairs = zip(self.attention, self.mlp, strict=True)
        return list(zip(itertools.chain(*pairs), self.norms, strict=True))

    def forward(self, x):
        for branch, norm in self.branches():
            x = x + branch(norm(x))
        return x

    def enumerate_paths(self, x):
        """Returns {(attentions, MLPs): the sum of all paths through so many}, one by one."""
        linear, state = [], x
        for branch, norm in self.branches():
            linear.append(
                lambda t, branch=branch, norm=norm, x=state: branch.linear(
                    norm(x), norm.linear(x, t)
                )
            )
            state = state + branch(norm(state))
        sums = {}
        for taken in itertools.product((0, 1), repeat=len(linear)):
            path = x
            for is_taken, apply in zip(taken, linear, strict=True):
                path = apply(path) if is_taken else path
            length = (sum(taken[::2]), sum(taken[1::2]))
            sums[length] = sums.get(length, 0) + path
        return sums


@torch.no_grad()
def check(network, **tolerance):
    x = torch.randn(1, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    contributions = path_lengths(network, x, branches=BRANCHES)
    expected = network.enumerate_paths(x)
    assert len(expected) == contributions.by_length.shape[:2].numel()
    for (attentions, mlps), sums in expected.items():
        entry = contributions.by_length[attentions, mlps]
        torch.testing.assert_close(entry, sums, **tolerance)
    torch.testing.assert_close(contributions.output, network(x), **tolerance)
    total = contributions.by_length.sum((0, 1)) + contributions.offset
    torch.testing.assert_close(total, contributions.output)


def test_gates_norms_and_softmax_are_frozen_however_they_are_written():
    names = ["gelu by tanh, written out", "silu as a quotient", "squared relu"]
    check(
        Network(
            activations=[ACTIVATIONS[name] for name in names],
            softmaxes=[SOFTMAXES[name] for name in ("by hand", "sink", "soft cap")],
            norms=[LayerNorm, HandNorm, lambda: HandNorm("reciprocal")],
        )
    )
    check(Network(activations=[ACTIVATIONS["silu as a quotient"], tanh_gelu], gated=True))


@pytest.mark.full
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_a_quotient_times_its_argument(name):
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if "float32" in name else {}
    check(Network(activations=[ACTIVATIONS[name]]), **tolerance)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "first power"])
def test_the_gate_of_a_gated_mlp_is_frozen(name):
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if "float32" in name else {}
    check(Network(activations=[ACTIVATIONS[name]], gated=True), **tolerance)


class Turned(nn.Module):
    """A linear branch, and an activation of the state that a factor of it scales."""

    def __init__(self, scale, act, maps):
        super().__init__()
        self.branch = nn.Linear(4, 4, bias=False).double()
        self.branch.weight.data = maps[1].T.clone()
        self.scale, self.act, self.maps = scale, act, maps

    def forward(self, x, other):
        h = x + self.branch(x)
        return (self.scale(h @ self.maps[1], other) * self.act(h)) @ self.maps[0]


TWO_GATES = {  # the factor that is frozen, the gate that passes
    "sigmoid times tanh": (lambda h, _: torch.sigmoid(h), torch.tanh),
    "1 + tanh times tanh": (lambda h, _: 1 + torch.tanh(h), torch.tanh),
    "cosine times squared relu": (lambda h, _: torch.cos(h), lambda h: F.relu(h) ** 2),
    "sigmoid times a constant": (lambda _, other: other, torch.sigmoid),
    "1 - sigmoid times a constant": (lambda _, other: other, lambda h: 1 - torch.sigmoid(h)),
    "sigmoid times weights": (lambda h, _: h.softmax(-1), torch.sigmoid),
}


@torch.no_grad()
@pytest.mark.parametrize("name", TWO_GATES)
def test_of_two_gates_the_one_that_is_not_0_at_0_is_frozen(name):
    """`tests/paths/traced/test_product_rules.py` has the same rule."""
    x, other, *maps = torch.randn(
        4, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    scale, act = TWO_GATES[name]
    paths = path_lengths(Turned(scale, act, maps), x, other, branches="branch", start="x")
    h = x + x @ maps[1]
    frozen = scale(h @ maps[1], other) * act(h) / h
    for entry, part in zip(paths.by_length, (x, x @ maps[1]), strict=True):
        torch.testing.assert_close(entry, (frozen * part) @ maps[0])


class Gate(nn.Module):
    """Computes a function in a branch, for use outside of it."""

    def __init__(self, compute, use):
        super().__init__()
        self.gate, self.use = nn.Module(), use
        self.gate.forward = compute

    def forward(self, x):
        return self.use(self.gate(x), x)


def exp_and_sum(x):
    return torch.exp(x), torch.exp(x).sum(-1, keepdim=True)


LEAVING = {
    "a gate of other entries": (lambda x: x.flip(-1).sigmoid(), lambda g, x: g * x.tanh()),
    "a gate": (torch.sigmoid, lambda g, x: g * x.tanh()),
    "a softmax": (exp_and_sum, lambda parts, x: (parts[0] / parts[1]) @ x.T),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", LEAVING)
def test_a_gate_that_leaves_a_branch_still_scales(kind):
    """It is computed in the branch, and multiplies an activation outside of it."""
    model = Gate(*LEAVING[kind])
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    paths = path_lengths(model, x, branches="gate")
    torch.testing.assert_close(paths.by_length[0], model(x))
    assert not paths.by_length[1:].any()


@pytest.mark.full
@pytest.mark.parametrize("name", SOFTMAXES)
def test_attention_weights_are_frozen(name):
    check(Network(softmaxes=[SOFTMAXES[name]]))


@pytest.mark.full
@pytest.mark.parametrize("kind", HandNorm.SCALES)
def test_norm_statistics_are_frozen(kind):
    check(Network(norms=[lambda: HandNorm(kind)]))


@pytest.mark.full
def test_six_layers():
    """2^12 paths."""
    check(Network(activations=[F.silu] * 6, norms=[HandNorm], gated=True))
