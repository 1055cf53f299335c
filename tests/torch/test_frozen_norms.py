"""Norms in one operator: without gains, over several axes, their means, scores, and refusals."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.values import Value
from tests.oracles.torch_operators import X, aten, draw, draw_tangents, make_call, push, torch
from tests.support.refusals import is_refused

STATES, CHANNELS = X(2, 3, 4), X(2, 6, 3, 4)
NO_TRAINING = "_native_batch_norm_legit_no_training"


def centre(t, dims):
    return t - t.mean(dims, keepdim=True)


def scale(array, dims, eps):
    return (array.var(dims, correction=0, keepdim=True) + eps).rsqrt()


def by_groups(t, groups):
    return t.reshape(2, groups, -1)


MEAN, VARIANCE = draw(6), draw(6).square()
# {norm: (name, arguments, what it makes of a tangent, its statistics frozen)}
CASES = {
    "layer norm": (
        "native_layer_norm", (STATES, [4], None, None, 0.1),
        lambda a, t: centre(t, [-1]) * scale(a, [-1], 0.1),
    ),
    "layer norm of two axes": (
        "native_layer_norm", (STATES, [3, 4], None, None, 0.1),
        lambda a, t: centre(t, [-2, -1]) * scale(a, [-2, -1], 0.1),
    ),
    "RMS norm": (
        "_fused_rms_norm", (STATES, [4], None, 0.1),
        lambda a, t: t * (a.square().mean(-1, keepdim=True) + 0.1).rsqrt(),
    ),
    "RMS norm of two axes": (
        "_fused_rms_norm", (STATES, [3, 4], None, 0.1),
        lambda a, t: t * (a.square().mean([-2, -1], keepdim=True) + 0.1).rsqrt(),
    ),
    "group norm": (
        "native_group_norm", (CHANNELS, None, None, 2, 6, 12, 3, 0.1),
        lambda a, t: (centre(by_groups(t, 3), [-1]) * scale(by_groups(a, 3), [-1], 0.1))
        .reshape(a.shape),
    ),
    "batch norm": (
        NO_TRAINING, (CHANNELS, None, None, MEAN, VARIANCE, 0.9, 0.1),
        lambda a, t: t * (VARIANCE + 0.1).rsqrt()[:, None, None],
    ),
    "batch norm of two axes": (
        NO_TRAINING, (X(5, 6), draw(6), None, MEAN, VARIANCE, 0.9, 0.1), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_a_norm_is_linear_where_its_statistics_are_frozen(kind):
    name, args, linear = CASES[kind]
    call, (value,) = make_call(name, getattr(aten, name).default, *args)
    result = call.compute()
    first, *others = freeze_call(call, result)
    tangents = draw_tangents([value])
    if linear is None:
        gain = args[1]
        expected = tangents[0] * (VARIANCE + 0.1).rsqrt() * gain
    else:
        expected = linear(value.array, tangents[0])
    torch.testing.assert_close(push(first, [value], tangents), expected)
    assert first.degree == 1 and not first.is_gate
    for other, array in zip(others, result[1:], strict=True):
        assert other.array is array
    if name in ("native_layer_norm", "native_group_norm"):  # the second result is the mean
        dims = list(range(-len(args[1]), 0)) if name == "native_layer_norm" else [-1]
        t = tangents[0] if name == "native_layer_norm" else by_groups(tangents[0], 3)
        mean = t.mean(dims, keepdim=name == "native_layer_norm")
        torch.testing.assert_close(push(others[0], [value], tangents), mean)
        assert [v.degree for v in others] == [1, 0]
    else:
        assert all(v.degree == 0 for v in others)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [None, [0], [-1], [0, 2]])
def test_of_a_variance_with_its_mean_the_mean_is_linear(dims, keepdim):
    call, (value,) = make_call("var_mean", aten.var_mean.correction, STATES, dims)
    call.kwargs = {"keepdim": keepdim}
    variance, mean = freeze_call(call, call.compute())
    tangents = draw_tangents([value])
    expected = tangents[0].mean([0, 1, 2] if dims is None else dims, keepdim)
    torch.testing.assert_close(push(mean, [value], tangents), expected)
    assert variance.degree == 0 and not variance.sources


def test_a_norm_of_scores_remains_scores():
    call, (value,) = make_call(
        "native_layer_norm", aten.native_layer_norm.default, STATES, [4], None, None, 0.1
    )
    value.degree, value.product = 2, "aten.bmm in a test"
    first, *others = freeze_call(call, call.compute())
    assert first.degree == 2 and [v.degree for v in others] == [0, 0]
    assert all(v.product == value.product for v in (first, *others))


@pytest.mark.parametrize("position", [0, 2])
def test_gains_that_depend_on_the_start_are_refused(position):
    """With constant states, too."""
    args = [STATES, [4], X(4), None, 0.1]
    call, _ = make_call("native_layer_norm", aten.native_layer_norm.default, *args)
    if position == 0:
        call.args[0] = Value(STATES.array)
    is_refused(
        r"aten\.native_layer_norm in a test depends on the start", freeze_call, call, call.compute()
    )
