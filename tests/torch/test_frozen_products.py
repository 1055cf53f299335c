"""Sums, products and quotients of two values: what carries paths, and what remains a gate."""

import math

import pytest

pytest.importorskip("torch")

from rank_collapse.torch.calls import Call
from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.sums import carry_sums
from rank_collapse.torch.values import Bases, Value
from tests.oracles.torch_operators import aten, draw, torch

H, W, ROW, ARRAY = draw(3, 4), draw(4, 4), draw(1, 4), draw(3, 4)
TWO = torch.tensor(2.0, dtype=torch.float64)
T = draw(3, 4)
I, J = torch.tensor([2, 0]), torch.tensor([1, 3])


class Trace:
    """Freezes operators one after the other: `trace("add.Tensor", a, 1)`."""

    def __init__(self):
        self.bases = Bases()
        self.h = Value(H, 1, base=self.bases.new())
        self.k = self("mm", self.h, Value(W))  # another value of degree 1

    def __call__(self, name, *args, **kwargs):
        name, _, overload = name.partition(".")
        target = getattr(getattr(aten, name), overload or "default")
        args = [Value(a) if isinstance(a, torch.Tensor) else a for a in args]
        call = Call(name, target, args, kwargs, "a test", self.bases)
        return freeze_call(call, call.compute())

    def carry(self, value):
        """Applies the paths from h to a value to T."""
        return carry_sums(value, self.h, T, 1, None)[0]


def exp_sum(t):
    return t("sum.dim_IntList", t("exp", t.h), [-1], True)


def as_numbers(t, mask):
    return t("_to_copy", mask, dtype=torch.float64)


def positive(t):
    return t("gt.Scalar", t.h, 0)


def cut(value):
    return "slice.Tensor", value, 1, 1, 4


K, TK, WIDE = H @ W, T @ W, draw(2, 3, 4)
GELU, SIGMOID, TANH, EXP = torch.nn.functional.gelu(H), H.sigmoid(), H.tanh(), H.exp()
SAME, NEW = "same base", "another base"
# {what is computed: (its value, what its paths make of T, whether it is a gate, its base, f(0))}
CASES = {
    "exp(h) + 1": (lambda t: t("add.Tensor", t("exp", t.h), 1), T * (EXP + 1) / H, True, SAME, 2),
    "1 - sigmoid(h)": (
        lambda t: t("rsub.Scalar", t("sigmoid", t.h), 1), T * (1 - SIGMOID) / H, True, SAME, 0.5,
    ),
    "exp(h) - 2 of a tensor": (
        lambda t: t("sub.Tensor", t("exp", t.h), TWO), T * (EXP - 2) / H, True, SAME, -1,
    ),
    "gelu(h) + 1, a bias": (
        lambda t: t("add.Tensor", t("gelu", t.h), 1), T * GELU / H, True, SAME, 1,
    ),
    "exp(h) + a row": (
        lambda t: t("add.Tensor", t("exp", t.h), ROW), T * EXP / H, True, SAME, None,
    ),
    "h + 1": (lambda t: t("add.Tensor", t.h, 1), T, False, SAME, None),
    "h + tanh(h)": (
        lambda t: t("add.Tensor", t.h, t("tanh", t.h)), T + T * TANH / H, True, SAME, 0,
    ),
    "exp(h) - h": (lambda t: t("sub.Tensor", t("exp", t.h), t.h), T * EXP / H - T, True, SAME, 1),
    "h + k": (lambda t: t("add.Tensor", t.h, t.k), T + TK, False, NEW, None),
    "h - 3 k": (lambda t: t("sub.Tensor", t.h, t.k, alpha=3), T - 3 * TK, False, NEW, None),
    "h + h": (lambda t: t("add.Tensor", t.h, t.h), 2 * T, False, SAME, None),
    "exp(h) with more axes": (
        lambda t: t("add.Tensor", t("exp", t.h), draw(2, 3, 4)),
        (T * EXP / H).expand(2, 3, 4), False, NEW, None,
    ),
    "exp(h) ** 1": (
        lambda t: t("pow.Tensor_Scalar", t("exp", t.h), 1.0), T * EXP / H, True, SAME, 1,
    ),
    "h ** 1": (lambda t: t("pow.Tensor_Scalar", t.h, 1), T, False, SAME, None),
    "- exp(h)": (lambda t: t("neg", t("exp", t.h)), -T * EXP / H, True, SAME, -1),
    "- h": (lambda t: t("neg", t.h), -T, False, SAME, None),
    "2 sigmoid(h)": (
        lambda t: t("mul.Tensor", t("sigmoid", t.h), 2), 2 * T * SIGMOID / H, True, SAME, 1,
    ),
    "sigmoid(h) times an array": (
        lambda t: t("mul.Tensor", ARRAY, t("sigmoid", t.h)), T * SIGMOID / H * ARRAY, True, SAME,
        0.5,
    ),
    "2 h": (lambda t: t("mul.Tensor", t.h, TWO), 2 * T, False, SAME, None),
    "h (h > 0)": (
        lambda t: t("mul.Tensor", t.h, t("gt.Scalar", t.h, 0)), T * (H > 0), True, SAME, 0,
    ),
    "h in more axes": (
        lambda t: t("mul.Tensor", t.h, draw(1, 1, 1) * 0 + 3), 3 * T[None], False, NEW, None,
    ),
    "h tanh(h)": (lambda t: t("mul.Tensor", t.h, t("tanh", t.h)), T * TANH, True, SAME, 0),
    "sigmoid(h) exp(h)": (
        lambda t: t("mul.Tensor", t("sigmoid", t.h), t("exp", t.h)), T * SIGMOID * EXP / H, True,
        SAME, 0.5,
    ),
    "h h": (lambda t: t("mul.Tensor", t.h, t.h), T * H, True, SAME, 0),
    "gelu(h) k": (lambda t: t("mul.Tensor", t("gelu", t.h), t.k), TK * GELU, False, NEW, None),
    "k gelu(h)": (lambda t: t("mul.Tensor", t.k, t("gelu", t.h)), TK * GELU, False, NEW, None),
    "sigmoid(h) tanh(k)": (
        lambda t: t("mul.Tensor", t("sigmoid", t.h), t("tanh", t.k)), TK * K.tanh() / K * SIGMOID,
        False, NEW, None,
    ),
    "tanh(h) exp(k)": (
        lambda t: t("mul.Tensor", t("tanh", t.h), t("exp", t.k)), T * TANH / H * K.exp(), False,
        NEW, None,
    ),
    "exp(h) @ k": (
        lambda t: t("mm", t("exp", t("t", t.h)), t.h), EXP.T @ T, False, NEW, None,
    ),
    "k @ exp(h)": (
        lambda t: t("mm", t.h, t("exp", t("t", t.k))), T @ K.T.exp(), False, NEW, None,
    ),
    "h @ W + b": (lambda t: t("addmm", draw(4), t.h, W), TK, False, NEW, None),
    "h + h @ W": (lambda t: t("addmm", t.h, t.h, W), T + TK, False, NEW, None),
    "k + A @ B": (lambda t: t("addmm", t.k, draw(3, 2), draw(2, 4)), TK, False, NEW, None),
    "h / 2": (lambda t: t("div.Tensor", t.h, 2), T / 2, False, SAME, None),
    "exp(h) / an array": (
        lambda t: t("div.Tensor", t("exp", t.h), ARRAY), T * EXP / H / ARRAY, True, SAME, 1,
    ),
    "h / (1 + (h > 0))": (
        lambda t: t("div.Tensor", t.h, t("add.Tensor", t("gt.Scalar", t.h, 0), 1)),
        T / (1 + (H > 0).double()), True, SAME, None,
    ),
    "h / (1 + exp(-h))": (
        lambda t: t("div.Tensor", t.h, t("add.Tensor", t("exp", t("neg", t.h)), 1)), T * SIGMOID,
        True, SAME, 0,
    ),
    "1 / (1 + exp(-h))": (
        lambda t: t("reciprocal", t("add.Tensor", t("exp", t("neg", t.h)), 1)), T * SIGMOID / H,
        True, SAME, 0.5,
    ),
    "2 / exp(h)": (lambda t: t("div.Tensor", TWO, t("exp", t.h)), T * 2 / EXP / H, True, SAME, 2),
    "h / k": (lambda t: t("div.Tensor", t.h, t.k), T / K, False, NEW, None),
    "exp(h) / k": (lambda t: t("div.Tensor", t("exp", t.h), t.k), T * EXP / H / K, True, NEW, None),
    "h / sum(h)": (
        lambda t: t("div.Tensor", t.h, t("sum.dim_IntList", t.h, [-1], True)),
        T / H.sum(-1, keepdim=True), False, NEW, None,
    ),
    "h exp(h > 0)": (  # functions of a mask are functions of h
        lambda t: t("mul.Tensor", t.h, t("exp", as_numbers(t, t("gt.Scalar", t.h, 0)))),
        T * torch.where(H > 0, math.e, 1.0), True, SAME, 0,
    ),
    "h times a mask of k": (
        lambda t: t("mul.Tensor", t.h, t("gt.Scalar", t.k, 0)), T * (K > 0), False, SAME, None,
    ),
    "h[:, 1:] (h > 0)[:, 1:]": (
        lambda t: t("mul.Tensor", t(*cut(t.h)), t(*cut(t("gt.Scalar", t.h, 0)))),
        (T * (H > 0))[:, 1:], True, NEW, 0,
    ),
    "h[:, 1:] (h > 0)[:, :3]": (
        lambda t: t("mul.Tensor", t(*cut(t.h)), t("slice.Tensor", t("gt.Scalar", t.h, 0), 1, 0, 3)),
        T[:, 1:] * (H > 0)[:, :3], False, NEW, None,
    ),
    "entries of h and of (h > 0), chosen alike": (
        lambda t: t("mul.Tensor", *(t("index_select", v, 1, I) for v in (t.h, positive(t)))),
        (T * (H > 0))[:, I], True, NEW, 0,
    ),
    "entries of h and of (h > 0), chosen otherwise": (
        lambda t: t(
            "mul.Tensor", t("index_select", t.h, 1, I), t("index_select", positive(t), 1, J)
        ),
        T[:, I] * (H > 0)[:, J], False, NEW, None,
    ),
    "tanh(exp(h) + a row)": (
        lambda t: t("tanh", t("add.Tensor", t("exp", t.h), ROW)), T * (EXP + ROW).tanh() / H, True,
        SAME, None,
    ),
    "exp(h) over an array of more axes": (
        lambda t: t("div.Tensor", t("exp", t.h), WIDE), T * EXP / H / WIDE, True, NEW, None,
    ),
    "max(h, h / 10)": (
        lambda t: t("maximum", t.h, t("mul.Tensor", t.h, 0.1)), T * torch.where(H > 0, 1, 0.1),
        True, SAME, None,
    ),
    "max(h, exp(h) - 1)": (
        lambda t: t("maximum", t.h, t("sub.Tensor", t("exp", t.h), 1)), T * (EXP - 1) / H, True,
        SAME, None,
    ),
    "h where h > 0, else k": (
        lambda t: t("where.self", t("gt.Scalar", t.h, 0), t.h, t.k), torch.where(H > 0, T, TK),
        False, NEW, None,
    ),
    "k where h > 0, else 2": (
        lambda t: t("where.self", t("gt.Scalar", t.h, 0), t.k, TWO), TK * (H > 0), False, NEW, None,
    ),
    "tanh(h) where k > 0, else 2": (
        lambda t: t("where.self", t("gt.Scalar", t.k, 0), t("tanh", t.h), TWO),
        T * TANH / H * (K > 0), True, NEW, 0,
    ),
    "h where h > 0, else more axes": (
        lambda t: t("where.self", t("gt.Scalar", t.h, 0), t.h, WIDE), (T * (H > 0)).expand(2, 3, 4),
        False, NEW, None,
    ),
    "tanh(h) beside exp(k)": (
        lambda t: t("cat", [t("tanh", t.h), t("exp", t.k)], 1),
        torch.cat([T * TANH / H, TK * K.exp() / K], 1), True, NEW, None,
    ),
    "floor(h / 2)": (
        lambda t: t("div.Tensor_mode", t.h, TWO, rounding_mode="floor"), T * (H / 2).floor() / H,
        True, SAME, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_carries_paths_and_what_is_a_gate(name):
    compute, expected, is_gate, base, at_zero = CASES[name]
    trace = Trace()
    value = compute(trace)
    assert value.degree == 1
    torch.testing.assert_close(trace.carry(value), expected)
    assert value.is_gate == is_gate and (value.base == trace.h.base) == (base == SAME)
    assert value.at_zero == pytest.approx(at_zero)
    if is_gate and base == SAME:
        torch.testing.assert_close(value.gate_of.array.abs(), H.abs())  # h or −h


DEGREE_2 = {
    "h k": lambda t: t("mul.Tensor", t.h, t.k),
    "h @ kᵀ": lambda t: t("mm", t.h, t("t", t.k)),
    "exp(h) @ exp(kᵀ)": lambda t: t("mm", t("exp", t.h), t("exp", t("t", t.k))),
    "gelu(h) @ k": lambda t: t("mm", t("gelu", t("t", t.h)), t.k),
    "(exp(h) + a row) @ k": lambda t: t("mm", t("t", t("add.Tensor", t("exp", t.h), ROW)), t.k),
    "gelu(h) gelu(k)": lambda t: t("mul.Tensor", t("gelu", t.h), t("gelu", t.k)),
    "exp(h) exp(k)": lambda t: t("mul.Tensor", t("exp", t.h), t("exp", t.k)),
    "a row of gates": lambda t: t("mul.Tensor", t("gelu", t.k), t("sum.dim_IntList", t.h, [0])),
}


@pytest.mark.parametrize("name", DEGREE_2)
def test_what_no_path_passes(name):
    """Such scores may be scaled, added to and moved, until a softmax freezes them."""
    trace = Trace()
    scores = DEGREE_2[name](trace)
    assert scores.degree == 2 and scores.product.endswith(" in a test")
    for further in (
        trace("add.Tensor", scores, 1),
        trace("add.Tensor", scores, ROW[:, :1]),
        trace("mul.Tensor", scores, TWO),
        trace("mul.Tensor", scores, scores),
        trace("div.Tensor", scores, 2),
        trace("neg", scores),
        trace("t", scores),
        trace("sum.dim_IntList", scores, [1], True),
        trace("max.dim", scores, 1)[0],
        trace("amax", scores, [1]),
    ):
        assert further.degree == 2 and further.product == scores.product
    for frozen in (trace("_softmax", scores, -1, False), trace("argmax", scores)):
        assert frozen.degree == 0 and frozen.product is None
    exponential = trace("exp", scores)
    assert exponential.degree == 0 and exponential.product == scores.product
    total = trace("sum.dim_IntList", exponential, [1], True)
    weights = trace("div.Tensor", exponential, total)
    assert weights.degree == 0 and not weights.sources


def test_a_frozen_function_of_a_product_may_weigh_and_not_be_added():
    trace = Trace()
    weights = trace("exp", trace("mm", trace.h, trace("t", trace.k)))
    torch.testing.assert_close(trace.carry(trace("mm", weights, trace.h)), (H @ K.T).exp() @ T)
    largest, places = trace("topk", weights, 2)
    assert largest.product == weights.product is not None and places.product is None
    square = trace("mm", trace("t", trace.h), trace.k)
    assert trace("add.Tensor", trace("relu", square), W).degree == 0
    assert (
        trace("add.Tensor", trace("exp", trace("mul.Tensor", trace.h, trace.k)), trace.h).degree
        == 2
    )


@pytest.mark.parametrize("scale", [1, 3.0])
@pytest.mark.parametrize("shift", [0, 1e-6])
def test_exponentials_over_their_sum_are_a_softmax(scale, shift):
    """Also where the sum is scaled, or a number is added to it."""
    trace = Trace()
    total = exp_sum(trace)
    assert total.summed_base == trace.h.base
    moved = trace("unsqueeze", trace("sum.dim_IntList", trace("exp", trace.h), [1], False), 1)
    assert trace("div.Tensor", trace("exp", trace.h), moved).degree == 0
    total = trace("mul.Tensor", total, scale) if scale != 1 else total
    total = trace("add.Tensor", total, shift) if shift else total
    total = trace("div.Tensor", total, TWO)
    assert trace("div.Tensor", trace("exp", trace.h), total).degree == 0
    other = trace("exp", trace.k)  # a sum over another value's entries
    assert trace("div.Tensor", other, total).degree == 1
    assert trace("div.Tensor", trace("exp", trace.h), trace("mul.Tensor", total, ROW)).degree == 1
    shifted = trace("add.Tensor", total, ROW[0, :3, None].abs())  # each row by its own number
    assert trace("div.Tensor", trace("exp", trace.h), shifted).degree == 1


def test_exponentials_over_their_mean_or_their_running_sum_are_no_softmax():
    trace = Trace()
    for other in (
        trace("mean.dim", trace("exp", trace.h), [-1], True),
        trace("cumsum", trace("exp", trace.h), 1),
    ):
        assert other.summed_base is None
        assert trace("div.Tensor", trace("exp", trace.h), other).degree == 1


def test_the_parts_of_a_joined_function_are_joined_too():
    """So that its zero entries have the path sums of what they are functions of."""
    trace = Trace()
    joined = trace("cat", [trace("tanh", trace.h), trace("exp", trace.k)], 1)
    torch.testing.assert_close(joined.gate_of.array, torch.cat([H, K], 1))
    torch.testing.assert_close(trace.carry(joined.gate_of), torch.cat([T, TK], 1))


@pytest.mark.parametrize("is_turned", [False, True])
def test_an_activation_that_is_written_out_has_its_slope_at_zero(is_turned):
    """As h · sigmoid(h), whose slope there is 1/2, in either order."""
    t, zeros = Trace(), H * (torch.arange(12).reshape(3, 4) % 3 > 0)
    t.h = Value(zeros, 1, base=t.bases.new())
    factors = [t("sigmoid", t.h), t.h]
    value = t("mul.Tensor", *(factors[::-1] if is_turned else factors))
    torch.testing.assert_close(t.carry(value), T * zeros.sigmoid())


WIDER = {
    "times an array": (lambda t, f: t("mul.Tensor", f, ARRAY), SIGMOID[:, :1] * ARRAY),
    "over an array": (lambda t, f: t("div.Tensor", f, ARRAY), SIGMOID[:, :1] / ARRAY),
    "over another value": (lambda t, f: t("div.Tensor", f, t.k), SIGMOID[:, :1] / K),
    "a maximum": (lambda t, f: t("maximum", f, ARRAY), torch.maximum(SIGMOID[:, :1], ARRAY)),
    "more axes": (lambda t, f: t("mul.Tensor", f, WIDE), SIGMOID[:, :1] * WIDE),
}


@pytest.mark.parametrize("kind", WIDER)
def test_a_gate_that_an_array_makes_wider_moves_and_stays_a_gate(kind):
    """As one gate for each token, times a number for each feature, split into heads."""
    make, number = WIDER[kind]
    t = Trace()
    gate = make(t, t("sigmoid", t("slice.Tensor", t.h, 1, 0, 1)))
    quotient = number / H[:, :1]
    torch.testing.assert_close(t.carry(gate), T[:, :1] * quotient)
    assert gate.is_gate and gate.gate_of.shape == gate.shape
    order = [2, 0, 1] if gate.array.ndim == 3 else [1, 0]
    for moved, move in (
        (t("permute", gate, order), lambda a: a.permute(order)),
        (t("view", gate, [*gate.shape[:-1], 2, 2]), lambda a: a.unflatten(-1, (2, 2))),
        (t("topk", gate, 4)[0], lambda a: a.gather(-1, number.topk(4)[1])),
    ):
        torch.testing.assert_close(t.carry(moved), move(T[:, :1] * quotient))
        torch.testing.assert_close(t.carry(moved.gate_of), move(T[:, :1].expand_as(number)))
        assert moved.is_gate
    if gate.shape == t.k.shape:
        product = t("mul.Tensor", gate, t.k)
        torch.testing.assert_close(t.carry(product), number * TK)
    bent = t("tanh", gate)
    torch.testing.assert_close(t.carry(bent), T[:, :1] * number.tanh() / H[:, :1])


MASK_FUNCTIONS = {
    "mul": lambda t, m: t("mul.Tensor", m, 2.0),
    "add": lambda t, m: t("add.Tensor", m, 1),
    "sub": lambda t, m: t("sub.Tensor", as_numbers(t, m), 3.0),
    "div": lambda t, m: t("div.Tensor", m, 2.0),
    "where": lambda t, m: t("where.self", m, TWO, 3 * TWO),
    "_to_copy": as_numbers,
    "clone": lambda t, m: t("clone", m),
    "alias": lambda t, m: t("alias", m),
    "logical_not": lambda t, m: t("logical_not", m),
    "bitwise_and": lambda t, m: t("bitwise_and.Tensor", m, t("lt.Scalar", t.h, 1)),
    "exp": lambda t, m: t("exp", as_numbers(t, m)),
}


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_a_function_of_a_mask_is_one_of_what_the_mask_is_of(name):
    """So h times it is an activation, whose value at 0 is 0."""
    t = Trace()
    number = MASK_FUNCTIONS[name](t, positive(t))
    assert number.degree == 0 and number.base == t.h.base
    product = t("mul.Tensor", t.h, number)
    assert product.is_gate and product.gate_of is t.h
    torch.testing.assert_close(t.carry(product), T * number.array)


def test_a_mask_that_becomes_wider_is_a_function_of_no_value():
    t = Trace()
    part = t("slice.Tensor", t.h, 1, 0, 1)
    mask = t("gt.Scalar", part, 0)
    assert t("mul.Tensor", mask, 2).base == part.base
    assert t("mul.Tensor", mask, ROW).base is None
    assert t("mul.Tensor", mask, positive(t)).base is None  # of two values
