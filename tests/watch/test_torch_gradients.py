"""Gradients of the parts of fused projections, against autograd by parts."""

import pytest

pytest.importorskip("torch")

from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_gradients import UNKNOWN, Share, measure_gradient
from tests.oracles.measured_layers import D, F, H, X, heads, join, nn, torch, watch_step

SIDES = [torch.arange(i * D, (i + 1) * D) for i in range(4)]
IN_TURN = torch.arange(2 * D).view(H, 2, D // H).transpose(0, 1).reshape(2, D)


class Gated(nn.Module):
    """Attention whose parts come from `project`, with gates beside them."""

    def __init__(self, project, **maps):
        super().__init__()
        torch.manual_seed(0)
        self.project = project
        for name, sizes in maps.items():
            setattr(self, name, nn.Linear(*sizes))

    def forward(self, x):
        q, k, v, gate = self.project(self, x)
        y = F.scaled_dot_product_attention(*(heads(a) for a in (q, k, v)))
        return (join(y) * gate).square().mean()


def project_side_by_side(self, x):
    q, gate, k, v = self.fused(x).split(D, -1)
    return q, k, v, gate.sigmoid()


def project_by_heads(self, x):
    """Queries and gates of a head stand beside each other, as in Qwen3-Next."""
    q, gate = self.q(x).unflatten(-1, (H, 2, D // H)).unbind(-2)
    q = F.rms_norm(q, (D // H,))
    return q.flatten(-2), self.k(x), self.v(x), gate.flatten(-2).sigmoid()


def project_gated_values(self, x):
    v, gate = self.v(x).chunk(2, -1)
    return self.q(x), self.k(x), v * gate.sigmoid(), 1.0


def project_value_embeddings(self, x):
    v = self.v(x) + 2 * self.gate(x).sigmoid() * x.detach()
    return self.q(x), self.k(x), v, 1.0


def project_temperature(self, x):
    return self.q(x) * F.softplus(self.gate(x)), self.k(x), self.v(x) / self.gate(x).exp(), 1.0


def project_addcmul(self, x):
    q = torch.addcmul(torch.zeros(()), self.q(x), self.gate(x).sigmoid())
    return (
        q,
        self.k(x),
        torch.lerp(torch.zeros(()), self.v(x), torch.special.expit(self.gate(x))),
        1.0,
    )


def project_in_place(self, x):
    q, v = self.q(x), self.v(x)
    q *= self.gate(x).sigmoid_()
    v *= 1 + self.gate(x).tanh_()
    return q, self.k(x), v, 1.0


def project_into_views(self, x):
    q, k = torch.zeros_like(x), torch.zeros_like(x)
    q[...].add_(self.q(x))
    k[...].copy_(self.k(x))
    return q, k, self.v(x), 1.0


def project_einsum(self, x):
    gate = self.gate(x)[..., 0].sigmoid()
    v = torch.einsum("bn,bnd->bnd", gate, self.v(x))
    return torch.einsum("bnd,bn->bnd", self.q(x), gate), self.k(x), v, 1.0


def project_low_rank(self, x):
    """One matrix for all parts, with a sum of low rank."""
    return *(self.fused(x) + self.up(self.down(x))).chunk(3, -1), 1.0


def project_after_a_map(self, x):
    """The tokens come from a map of the same module, which is none of queries."""
    y = self.before(x).relu()
    return self.q(y), self.k(y), self.v(y), 1.0


def project_two_halves(self, x):
    """Two maps of the queries read a half each of what an earlier map made of the tokens."""
    first, last = self.before(x).chunk(2, -1)
    return self.q(first) + self.last(last), self.k(x), self.v(x), 1.0


SINGLE = {"q": (D, D), "k": (D, D), "v": (D, D), "gate": (D, 1)}
LAYOUTS = {
    "after a map": (
        project_after_a_map,
        SINGLE | {"before": (D, D)},
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "two halves": (
        project_two_halves,
        SINGLE | {"before": (D, D), "q": (D // 2, D), "last": (D // 2, D)},
        {
            "query": dict.fromkeys(("before", "q", "last"), SIDES[0]),
            "key": {"k": SIDES[0]},
            "value": {"v": SIDES[0]},
        },
    ),
    "side by side": (
        project_side_by_side,
        {"fused": (D, 4 * D)},
        {"query": {"fused": SIDES[0]}, "key": {"fused": SIDES[2]}, "value": {"fused": SIDES[3]}},
    ),
    "by heads": (
        project_by_heads,
        SINGLE | {"q": (D, 2 * D)},
        {"query": {"q": IN_TURN[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "gated values": (
        project_gated_values,
        SINGLE | {"v": (D, 2 * D)},
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "value embeddings": (
        project_value_embeddings,
        SINGLE,
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "temperature": (
        project_temperature,
        SINGLE,
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "addcmul": (
        project_addcmul,
        SINGLE | {"gate": (D, D)},
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "in place": (
        project_in_place,
        SINGLE | {"gate": (D, D)},
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "into views": (
        project_into_views,
        SINGLE,
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "einsum": (
        project_einsum,
        SINGLE,
        {"query": {"q": SIDES[0]}, "key": {"k": SIDES[0]}, "value": {"v": SIDES[0]}},
    ),
    "low rank": (
        project_low_rank,
        {"fused": (D, 3 * D), "down": (D, 4), "up": (4, 3 * D)},
        {
            part: {"fused": SIDES[i], "up": SIDES[i], "down": torch.arange(4)}
            for i, part in enumerate(("query", "key", "value"))
        },
    ),
}


@pytest.mark.parametrize("project, maps, parts", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_are_of_the_part_alone(project, maps, parts):
    model = Gated(project, **maps)
    row, watched = watch_step(model, X)
    for part, rows in parts.items():
        squares = [
            getattr(model, name).get_parameter(kind).grad[places].double().square().sum().item()
            for name, places in rows.items()
            for kind in ("weight", "bias")
        ]
        expected = pytest.approx([sum(squares) ** 0.5], rel=1e-4)
        assert row[f"{part}_gradient"] == expected, watched


def multiply_by_features(q, k):
    return q[..., :3] @ k[..., :3].mT + q[..., 3:] @ k[..., 3:].mT


def multiply_by_heads(q, k):
    return torch.stack([q[:, i] @ k[:, i].mT for i in range(H)], dim=1)


@pytest.mark.parametrize("multiply", [multiply_by_features, multiply_by_heads])
def test_gradients_are_of_all_products_that_weights_are_made_of(multiply):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

        def forward(self, x):
            q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
            return join(multiply(q, k).softmax(-1) @ v).square().mean()

    torch.manual_seed(0)
    model = Model()
    row, watched = watch_step(model, X)
    for part, linear in (("query", model.q), ("key", model.k), ("value", model.v)):
        gradient = torch.cat([linear.weight.grad.flatten(), linear.bias.grad])
        expected = pytest.approx([gradient.norm().item()], rel=1e-4)
        assert row[f"{part}_gradient"] == expected, watched


def test_a_part_whose_features_are_not_known_is_left_out():
    def project(self, x):
        return F.glu(self.q(x)), self.k(x), self.v(x), 1.0

    row, watched = watch_step(Gated(project, **SINGLE | {"q": (D, 2 * D)}), X)
    assert "query_gradient" not in row and "value_gradient" in row
    assert (
        "no query gradient: the part of a parameter that made it is unknown" in watched.describe()
    )


def make_parameter(*shape):
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return parameter


def select(*outputs, width):
    return torch.tensor([i in outputs for i in range(width)])


def test_the_norm_is_of_the_outputs_that_any_share_has():
    """Of one parameter each output counts once; a map may begin at a later output."""
    matrix, vector, none = make_parameter(6, 4), make_parameter(6), nn.Parameter(torch.ones(2))
    shares = [
        Share(matrix, 0, 0, select(0, 2, width=3)),
        Share(matrix, 0, 2, select(0, 1, width=3)),  # outputs 2 and 3
        Share(vector, 0, 0, select(5, width=6)),
        Share(none, 0, 0, select(0, width=2)),  # without a gradient
    ]
    rows = matrix.grad[[0, 2, 3]].square().sum() + vector.grad[5].square()
    assert measure_gradient(shares).item() == pytest.approx(rows.sqrt().item())
    columns = [Share(matrix, 1, 1, select(0, 2, width=3))]
    expected = matrix.grad[:, [1, 3]].norm().item()
    assert measure_gradient(columns).item() == pytest.approx(expected)
    whole = [Share(matrix, -1, 0, select(0, 1, width=2)), Share(matrix, -1, 0, select(0, width=2))]
    assert measure_gradient(whole).item() == pytest.approx(matrix.grad.norm().item())


def test_what_is_not_known_of_a_parameter_is_left_out():
    matrix, none = make_parameter(6, 4), nn.Parameter(torch.ones(2))
    for shares in (
        [Share(None, -1, 0, select(0, width=2))],
        [Share(matrix, 0, 0, select(0, width=2)), Share(None, 0, 0, select(0, width=2))],
        [Share(matrix, -1, 0, select(0, width=2))],  # a part, along an unknown axis
        [Share(matrix, 0, 5, select(0, 1, width=2))],  # beyond the last output
    ):
        with pytest.raises(LeftOut, match=UNKNOWN):
            measure_gradient(shares)
    with pytest.raises(LeftOut, match="no parameter of it has one"):
        measure_gradient([Share(none, 0, 0, select(0, width=2))])


@pytest.mark.parametrize("axis", [0, -1])
def test_squares_of_gradients_of_16_bits_do_not_overflow(axis):
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 300.0)
    assert measure_gradient([Share(parameter, axis, 0, torch.ones(2, dtype=torch.bool))]) == 600
