"""What each operator freezes: gates, statistics and norms."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.sums import carry_sums
from tests.oracles.torch_operators import (
    CONSTANTS,
    ENTRYWISE,
    STATISTICS,
    X,
    aten,
    complex_x,
    derive,
    draw,
    draw_tangents,
    image,
    make_call,
    positive,
    push,
    torch,
    x,
)
from tests.support.refusals import is_refused

# Of what torch itself imports for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def split(names):
    return names.split()


@pytest.mark.parametrize("name", ENTRYWISE)
def test_an_entrywise_function_is_a_quotient_times_its_argument(name):
    call, values = make_call(name, *ENTRYWISE[name])
    if name in ("rsqrt", "log"):
        call, values = make_call(name, ENTRYWISE[name][0], positive)
    result = call.compute()
    value = freeze_call(call, result)
    (tangent,) = draw_tangents(values)
    assert value.is_gate and value.gate_of is values[0] and value.base == values[0].base
    expected = tangent * result / values[0].array
    torch.testing.assert_close(push(value, values, (tangent,)), expected)


@pytest.mark.parametrize("name", split("relu gelu tanh sigmoid exp expm1 sin softplus elu"))
def test_where_the_argument_is_0_the_quotient_is_the_slope(name):
    zeros = X(array=torch.zeros(3, dtype=torch.float64))
    call, values = make_call(name, getattr(aten, name).default, zeros)
    value = freeze_call(call, call.compute())
    tangents = draw_tangents(values)
    expected = derive(call, values, tangents, None)
    torch.testing.assert_close(push(value, values, tangents), expected)
    assert value.at_zero == float(getattr(aten, name)(torch.zeros(()).double()))


@pytest.mark.parametrize("name", STATISTICS | CONSTANTS)
def test_statistics_and_comparisons_are_frozen(name):
    call, _ = make_call(name, *(STATISTICS | CONSTANTS)[name])
    value = freeze_call(call, call.compute())
    assert value.degree == 0 and not value.sources


def test_a_power_of_1_is_linear_and_of_0_a_constant():
    for exponent, degree in ((1, 1), (1.0, 1), (0, 0), (2, 1)):
        call, _ = make_call("pow", aten.pow.Tensor_Scalar, x, exponent)
        value = freeze_call(call, call.compute())
        assert value.degree == degree and value.is_gate == (exponent == 2)
    call, _ = make_call("pow", aten.pow.Scalar, 2.0, x)
    assert freeze_call(call, call.compute()).is_weight


def freeze_norm(name, target, *args):
    call, values = make_call(name, target, *args)
    (tangent,) = draw_tangents(values)
    results = freeze_call(call, call.compute())
    return values[0].array, results, tangent, push(results[0], values, (tangent,)), values


def test_norms_freeze_their_statistics():
    gain, bias = draw(6), draw(6)
    array, results, t, pushed, _ = freeze_norm(
        "native_layer_norm", aten.native_layer_norm.default, x, [6], gain, bias, 1e-5
    )
    scale = (array.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(pushed, (t - t.mean(1, keepdim=True)) * scale * gain)
    assert [v.degree for v in results] == [1, 1, 0]

    array, results, t, pushed, _ = freeze_norm(
        "_fused_rms_norm", aten._fused_rms_norm.default, x, [6], gain, 1e-5
    )
    scale = (array.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(pushed, t * scale * gain)

    gain, bias = draw(4), draw(4)
    args = (image, gain, bias, 1, 4, 24, 2, 1e-5)
    array, results, t, pushed, _ = freeze_norm(
        "native_group_norm", aten.native_group_norm.default, *args
    )
    groups, tangents = array.view(2, -1), t.view(2, -1)
    scale = (groups.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    expected = ((tangents - tangents.mean(1, keepdim=True)) * scale).view(1, 4, 4, 6)
    torch.testing.assert_close(pushed, expected * gain[:, None, None])

    mean, var = draw(4), draw(4).square()
    args = (image, gain, bias, mean, var, 0.1, 1e-5)
    name = "_native_batch_norm_legit_no_training"
    array, results, t, pushed, _ = freeze_norm(name, getattr(aten, name).default, *args)
    expected = t * ((var + 1e-5).rsqrt() * gain)[:, None, None]
    torch.testing.assert_close(pushed, expected)


def test_of_var_mean_the_variance_is_frozen_and_the_mean_is_linear():
    call, values = make_call("var_mean", aten.var_mean.correction, x, [1])
    variance, mean = freeze_call(call, call.compute())
    (tangent,) = draw_tangents(values)
    assert variance.degree == 0
    torch.testing.assert_close(push(mean, values, (tangent,)), tangent.mean(1))


@pytest.mark.parametrize("name", ["cumprod", "prod", "linalg_inv_ex", "digamma", "cdist"])
def test_what_is_in_no_table_is_refused_by_name(name):
    targets = {
        "cumprod": (aten.cumprod.default, x, 1),
        "prod": (aten.prod.default, x),
        "linalg_inv_ex": (aten.linalg_inv_ex.default, X(3, 3)),
        "digamma": (aten.digamma.default, positive),
        "cdist": (aten._cdist_forward.default, x, draw(3, 6), 2.0, None),
    }
    call, _ = make_call(name, *targets[name])
    is_refused(rf"aten\.{name} in a test .*\.detach\(\)", freeze_call, call, call.compute())


@pytest.mark.parametrize(
    ("args", "position"),
    [
        (("Tensor_Tensor", positive, draw(4, 6)), 0),
        (("Tensor_Tensor", positive, torch.ones(1, dtype=torch.float64)), 0),
        (("Tensor_Tensor", draw(4, 6).abs(), x), 1),
        (("Tensor_Tensor", torch.tensor(2.0, dtype=torch.float64), x), 1),
        (("Scalar", 2.0, x), 1),
    ],
)
def test_a_power_of_tensors_is_a_gate_of_what_depends(args, position):
    overload, *args = args
    call, (value,) = make_call("pow", getattr(aten.pow, overload), *args)
    result = freeze_call(call, call.compute())
    assert result.is_gate and result.gate_of is value is call.args[position]
    (tangent,) = draw_tangents([value])
    powers = call.compute()
    expected = tangent * powers / value.array
    torch.testing.assert_close(push(result, [value], (tangent,)), expected)
    is_number = overload == "Scalar" or args[1 - position].ndim == 0
    assert result.at_zero == (1.0 if is_number else None)


def test_a_function_of_complex_numbers_has_no_real_value_at_zero():
    call, (value,) = make_call("exp", aten.exp.default, complex_x)
    result = freeze_call(call, call.compute())
    assert result.is_gate and result.at_zero is None and not result.is_weight
    tangents = draw_tangents([value])
    expected = tangents[0] * value.array.exp() / value.array
    torch.testing.assert_close(push(result, [value], tangents), expected)


def test_where_the_argument_is_0_each_entry_has_its_own_slope():
    """One argument of a maximum may have more axes than the other."""
    h, bounds = torch.tensor([0.0, 1]), torch.tensor([[-1.0, -1], [-1, 3], [2, 0]])
    call, (value,) = make_call("maximum", aten.maximum.default, X(array=h), bounds)
    result = freeze_call(call, call.compute())
    assert result.is_gate and result.base != value.base and result.at_zero is None
    pushed = carry_sums(result, value, torch.tensor([10.0, 100]), 1, None)[0]
    assert pushed.tolist() == [[10, 100], [10, 300], [0, 100]]


@pytest.mark.parametrize(
    ("name", "target", "args"),
    [
        ("clamp", aten.clamp.Tensor, (draw(4, 6), x)),
        ("_prelu_kernel", aten._prelu_kernel.default, (draw(4, 6), x)),
        ("div", aten.div.Tensor_mode, (draw(4, 6), x)),
    ],
)
def test_a_function_of_another_argument_alone_is_refused(name, target, args):
    call, _ = make_call(name, target, *args)
    call.kwargs = {"rounding_mode": "floor"} if name == "div" else {}
    message = rf"aten\.{name} in a test depends on the start through several arguments or an unus"
    is_refused(message, freeze_call, call, call.compute())


@pytest.mark.parametrize(
    ("name", "target", "args"),
    [
        ("clamp", aten.clamp.Tensor, (x, X(4, 6))),
        ("clamp", aten.clamp.Tensor, (x, None, X(4, 6))),
        ("_prelu_kernel", aten._prelu_kernel.default, (x, X(4, 6))),
        ("pow", aten.pow.Tensor_Tensor, (positive, X(4, 6))),
    ],
)
def test_a_function_of_several_values_is_refused(name, target, args):
    """Also where the first of them is the one whose gate it would be."""
    call, values = make_call(name, target, *args)
    assert len(values) == 2
    message = rf"aten\.{name} in a test depends on the start through several arguments"
    is_refused(message, freeze_call, call, call.compute())
