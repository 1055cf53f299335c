"""Exact derivatives of operators, against forward mode."""

import warnings

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import operators
from rank_collapse.torch.calls import split_results
from rank_collapse.torch.exact import differentiate_call
from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.values import is_floating
from tests.oracles.torch_operators import (
    CHOICES,
    ENTRYWISE,
    MOVES,
    PRODUCTS,
    STATISTICS,
    SUMS,
    X,
    aten,
    derive,
    draw,
    draw_tangents,
    make_call,
    positive,
    push,
    torch,
    x,
)
from tests.support.refusals import is_refused

# Of what torch itself imports for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


LINEAR = MOVES | SUMS | PRODUCTS | CHOICES


@pytest.mark.parametrize("name", LINEAR | ENTRYWISE | STATISTICS)
def test_the_exact_rule_is_the_derivative(name):
    call, values = make_call(name, *(LINEAR | ENTRYWISE | STATISTICS)[name])
    if name == "rsqrt":
        call, values = make_call(name, aten.rsqrt.default, positive)
    tangents = draw_tangents(values)
    result = call.compute()
    exact = differentiate_call(call, result)
    exact = exact if isinstance(exact, list) else [exact]
    for (index, array), value in zip(split_results(result), exact, strict=True):
        if is_floating(array):
            expected = derive(call, values, tangents, index)
            with warnings.catch_warnings():
                warnings.simplefilter("error", DeprecationWarning)
                derivative = push(value, values, tangents)
                with pytest.raises(DeprecationWarning):  # the caller's filters stay
                    warnings.warn("a warning of the caller", DeprecationWarning, stacklevel=1)
            torch.testing.assert_close(derivative, expected)


@pytest.mark.parametrize("name", ["mul", "mm", "bmm", "dot", "addmm", "baddbmm", "convolution"])
@pytest.mark.parametrize("added_depends", [False, True])
def test_a_product_of_two_states_has_degree_2_and_an_exact_derivative(name, added_depends):
    """Also where what is added to it depends on the start."""
    target, *args = PRODUCTS[name]
    product = operators.PRODUCTS[name]
    added = [product.added] if added_depends and product.added is not None else []
    for position in (product.left, product.right, *added):
        if isinstance(args[position], torch.Tensor):
            args[position] = X(array=args[position])
    call, values = make_call(name, target, *args)
    result = call.compute()
    assert freeze_call(call, result).degree == 2
    tangents = draw_tangents(values)
    value = differentiate_call(call, result)
    torch.testing.assert_close(push(value, values, tangents), derive(call, values, tangents, None))


@pytest.mark.parametrize("differentiate", [differentiate_call, freeze_call])
def test_what_depends_on_nothing_is_a_constant(differentiate):
    for name, args in {"unbind": (draw(2, 3), 0), "tanh": (draw(2, 3),)}.items():
        target = aten.unbind.int if name == "unbind" else aten.tanh.default
        call, _ = make_call(name, target, *args)
        result = call.compute()
        values = differentiate(call, result)
        values = values if isinstance(values, list) else [values]
        arrays = [array for _, array in split_results(result)]
        for value, array in zip(values, arrays, strict=True):
            assert value.degree == 0 and value.array is array and not value.sources


@pytest.mark.parametrize("differentiate", [differentiate_call, freeze_call])
@pytest.mark.parametrize(
    ("name", "target", "args"),
    [
        ("index_select", aten.index_select.default, (x, 1, X(3))),
        ("sum", aten.sum.dim_IntList, (draw(4, 6), X(1))),
        ("scatter_add", aten.scatter_add.default, (x, 0, X(4, 6), x)),
    ],
)
def test_what_depends_through_another_argument_is_refused(differentiate, name, target, args):
    """No operator of torch does: it is computed with whole numbers there."""
    call, _ = make_call(name, target, *args)
    text = rf"aten\.{name} in a test depends on the start through several arguments or an unusual"
    is_refused(text, differentiate, call, draw(4, 6))


def test_a_kernel_is_refused_in_the_exact_derivative_too():
    name = "_scaled_dot_product_flash_attention_for_cpu"
    call, _ = make_call(name, getattr(aten, name).default, X(1, 2, 3, 4), *[draw(1, 2, 3, 4)] * 2)
    for differentiate in (differentiate_call, freeze_call):
        is_refused("computes attention in one kernel", differentiate, call, call.compute())
        for call.name in operators.KERNELS:  # those of other processors, too
            with pytest.raises(ValueError, match=f"{call.name} in .* attention in one kernel"):
                differentiate(call, call.args[0].array)
        call.name = name


def test_an_operator_of_another_library_has_no_derivative():
    call, _ = make_call("library::function", aten.tanh.default, x)
    is_refused(
        "library::function in a test reads a value that depends",
        differentiate_call,
        call,
        call.compute(),
    )
