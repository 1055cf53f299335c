"""The table of operators: each alone, against forward-mode derivatives and its frozen meaning."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch import operators
from rank_collapse.torch.calls import split_results
from rank_collapse.torch.exact import differentiate_call
from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.graph import _by_position, _name_of
from rank_collapse.torch.values import is_floating
from tests.oracles.torch_operators import (
    CHOICES,
    CONSTANTS,
    ENTRYWISE,
    MOVES,
    PRODUCTS,
    STATISTICS,
    SUMS,
    aten,
    derive,
    draw,
    draw_tangents,
    image,
    make_call,
    mask,
    push,
    torch,
    x,
)

# Of what torch itself imports for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


IN_INTEGERS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"}
SIZE_OPERATORS = {"sym_size", "sym_stride", "sym_numel", "_assert_async", "_assert_scalar"}
SIZE_OPERATORS |= {"_assert_tensor_metadata"}
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
        (operators.CONSTANTS - IN_INTEGERS - SIZE_OPERATORS, CONSTANTS),
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


OTHER_ARGUMENTS = {
    "a fill with True": ("masked_fill", aten.masked_fill.Scalar, x, mask, True),
    "a padding without its value": ("constant_pad_nd", aten.constant_pad_nd.default, x, [1, 2]),
    "a convolution without a bias": (
        "convolution", aten.convolution.default,
        *(image, draw(8, 2, 3, 3), None),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_ARGUMENTS)
@pytest.mark.parametrize("rule", [freeze_call, differentiate_call])
def test_arguments_that_are_no_tensors_or_left_out(rule, kind):
    call, values = make_call(*OTHER_ARGUMENTS[kind])
    tangents = draw_tangents(values)
    value = rule(call, call.compute())
    expected = derive(call, values, tangents, None)
    assert value.degree == 1
    torch.testing.assert_close(push(value, values, tangents), expected)


def test_what_has_no_derivative_is_a_constant():
    """Whole numbers and Bools that an operator makes of a value, by name or by its dtype."""
    for name, target, *args in (
        ("_to_copy", aten._to_copy.default, x),
        ("signbit", aten.signbit.default, x),
    ):
        call, _ = make_call(name, target, *args)
        call.kwargs = {"dtype": torch.int64} if name == "_to_copy" else {}
        for rule in (freeze_call, differentiate_call):
            value = rule(call, call.compute())
            assert value.degree == 0 and not value.sources


def test_arguments_by_keyword_have_the_positions_of_the_schema():
    target = aten.sum.dim_IntList
    keywords = {"keepdim": True, "dim": [1], "dtype": None}
    args, kwargs = _by_position(target, [3], keywords)
    assert args == [3, [1], True] and kwargs == {"dtype": None}
    args, kwargs = _by_position(target, [3], {"keepdim": True})
    assert args == [3, None, True] and not kwargs  # the default stands between them
    assert _by_position(len, [3], {"x": 4}) == ([3], {"x": 4})


def test_a_copy_that_detach_made_is_named_so_and_another_alias_is_not():
    graph = torch.fx.Graph()
    nodes = [graph.call_function(aten.alias.default, (graph.placeholder("x"),)) for _ in range(2)]
    nodes[0].meta["original_aten"] = aten.detach.default
    nodes[1].meta["original_aten"] = aten.alias.default
    other = graph.call_function(aten.clone.default, (nodes[0],))
    other.meta["original_aten"] = aten.detach.default
    assert [_name_of(node) for node in (*nodes, other)] == ["detach", "alias", "clone"]


def test_every_name_of_a_table_is_one_of_an_operator_of_torch():
    """Also of those that no processor here computes, such as the kernels of attention."""
    tables = [operators.MOVES, operators.SUMS, operators.PRODUCTS, operators.ENTRYWISE]
    tables += [operators.STATISTICS, operators.CONSTANTS, operators.CHOICES, operators.NORMS]
    tables += [operators.KERNELS, operators.BATCH_NORMS]
    for name in {name for table in tables for name in table if "::" not in name}:
        assert hasattr(aten, name) or hasattr(torch.ops.higher_order, name), name
