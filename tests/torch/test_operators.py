"""The table of operators: each alone, against forward-mode derivatives and its frozen meaning."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import operators
from rank_collapse.torch.calls import split_results
from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.values import is_floating
from tests.oracles.torch_operators import (
    CHOICES,
    CONSTANTS,
    ENTRYWISE,
    MOVES,
    PRODUCTS,
    STATISTICS,
    SUMS,
    derive,
    draw_tangents,
    make_call,
    push,
    torch,
)

# Of what torch itself imports for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


IN_INTEGERS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"}
OF_SIZES = {"sym_size", "sym_stride", "sym_numel", "_assert_async", "_assert_scalar"}
OF_SIZES |= {"_assert_tensor_metadata"}
ALONE = {"_grouped_mm", "transformers::grouped_mm_fallback"}  # in models of experts
LINEAR = MOVES | SUMS | PRODUCTS | CHOICES


def results_of(values):
    return [v for v in values if v.degree] if isinstance(values, list) else [values]


def test_every_operator_of_the_table_is_tested():
    for table, cases in (
        (operators.MOVES, MOVES),
        (operators.SUMS, SUMS),
        (operators.PRODUCTS.keys() - ALONE, PRODUCTS),
        (operators.ENTRYWISE, ENTRYWISE),
        (operators.STATISTICS, STATISTICS),
        (operators.CONSTANTS - IN_INTEGERS - OF_SIZES, CONSTANTS),
        (operators.CHOICES, CHOICES),
    ):
        assert set(table) == cases.keys()
    tables = [operators.MOVES, operators.SUMS, operators.PRODUCTS, operators.ENTRYWISE]
    tables += [operators.STATISTICS, operators.CONSTANTS, operators.CHOICES, operators.NORMS]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_passes_its_derivative(name):
    call, values = make_call(name, *LINEAR[name])
    tangents = draw_tangents(values)
    result = call.compute()
    frozen = freeze_call(call, result)
    frozen = frozen if isinstance(frozen, list) else [frozen]
    for (index, array), value in zip(split_results(result), frozen, strict=True):
        if not is_floating(array):
            assert value.degree == 0
            continue
        assert value.degree == 1 and value.array is array
        expected = derive(call, values, tangents, index)
        torch.testing.assert_close(push(value, values, tangents), expected)
