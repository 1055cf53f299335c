"""Exact derivatives of operators, against forward mode."""

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
    draw_tangents,
    make_call,
    positive,
    push,
    torch,
)

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
            torch.testing.assert_close(push(value, values, tangents), expected)


@pytest.mark.parametrize("name", ["mul", "mm", "bmm", "dot", "addmm", "baddbmm", "convolution"])
def test_a_product_of_two_states_has_degree_2_and_an_exact_derivative(name):
    target, *args = PRODUCTS[name]
    product = operators.PRODUCTS[name]
    for position in (product.left, product.right):
        if isinstance(args[position], torch.Tensor):
            args[position] = X(array=args[position])
    call, values = make_call(name, target, *args)
    result = call.compute()
    assert freeze_call(call, result).degree == 2
    tangents = draw_tangents(values)
    value = differentiate_call(call, result)
    torch.testing.assert_close(push(value, values, tangents), derive(call, values, tangents, None))
