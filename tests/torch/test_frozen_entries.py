"""Entries in other places: what is a gate there, of which value, and what choices freeze."""

import pytest

pytest.importorskip("torch")

from rank_collapse.torch.calls import split_results
from rank_collapse.torch.frozen import freeze_call
from rank_collapse.torch.values import is_floating
from tests.oracles.torch_operators import (
    CHOICES,
    MOVES,
    X,
    aten,
    draw,
    draw_tangents,
    make_call,
    mask,
    push,
    torch,
    x,
)
from tests.support.refusals import is_refused

# Of what torch itself imports for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

# Complex numbers have no gates of these functions; `where` is below.
OTHERS = ("real", "imag", "view_as_real", "where")
GATES = {name: case for name, case in MOVES.items() if name not in OTHERS}


def make_gates(name, target, *args, function="tanh"):
    """Returns a call whose values are gates, and the values of which they are gates."""
    call, values = make_call(name, target, *args)
    for value in values:
        inner, (linear,) = make_call(
            function, getattr(aten, function).default, X(array=value.array)
        )
        linear.base = value.base
        inner.bases = call.bases
        gate = freeze_call(inner, inner.compute())
        for field, content in vars(gate).items():
            setattr(value, field, content)
    return call, values, [gate.gate_of for gate in values]


def apply_linearly(call, gates, arrays, index):
    """Applies an operator to arrays, less what its constants give."""
    zeros = tuple(torch.zeros_like(a) for a in arrays)
    full, constant = (call.compute_replacing(tuple(gates), a) for a in (tuple(arrays), zeros))
    return full - constant if index is None else full[index] - constant[index]


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("function", ["tanh", "sigmoid"])
def test_a_gate_whose_entries_move_is_a_gate_of_what_moves_so(name, function):
    call, gates, linear = make_gates(name, *GATES[name], function=function)
    result = call.compute()
    values = freeze_call(call, result)
    values = values if isinstance(values, list) else [values]
    arrays = [value.array for value in linear]
    tangents = draw_tangents(linear)
    num_results = 0
    for (index, array), value in zip(split_results(result), values, strict=True):
        if not is_floating(array):
            continue
        num_results += 1
        assert value.is_gate and value.at_zero == gates[0].at_zero
        root = value.gate_of
        torch.testing.assert_close(root.array, apply_linearly(call, gates, arrays, index))
        expected = apply_linearly(call, gates, tangents, index)
        torch.testing.assert_close(push(root, linear, tangents), expected)
    assert len({value.base for value in values}) == num_results  # each has a base of its own


@pytest.mark.parametrize("name", ["clone", "alias", "_to_copy"])
def test_a_copy_is_the_same_function(name):
    call, (value,) = make_call(name, *MOVES[name])
    assert freeze_call(call, call.compute()).base == value.base


def test_the_same_move_of_the_same_function_gives_the_same_base():
    call, (value,) = make_call("slice", *MOVES["slice"])
    first, second = (freeze_call(call, call.compute()) for _ in range(2))
    assert first.base == second.base != value.base
    call.args[2] = 0
    assert freeze_call(call, call.compute()).base != first.base


def test_where_a_gate_and_another_value_are_joined_nothing_is_a_gate():
    _, (gate,), _ = make_gates("cat", aten.cat.default, [x, draw(4, 2)], 1)
    other = X(4, 2)
    mixed, values = make_call("cat", aten.cat.default, [x, other], 1)
    for field, content in vars(gate).items():
        setattr(values[0], field, content)
    value = freeze_call(mixed, mixed.compute())
    assert value.degree == 1 and not value.is_gate and value.at_zero is None


PICKED = [name for name in CHOICES if name not in ("amax", "amin", "maximum", "minimum")]


@pytest.mark.parametrize("name", PICKED)
def test_chosen_gates_are_gates_of_the_entries_that_are_chosen(name):
    call, gates, linear = make_gates(name, *CHOICES[name])
    chosen, indices = freeze_call(call, call.compute())
    assert indices.degree == 0 and chosen.is_gate and chosen.base != gates[0].base
    root = chosen.gate_of  # tanh rises: the choice is that of its argument
    torch.testing.assert_close(torch.tanh(root.array), chosen.array)
    torch.testing.assert_close(root.array, call.target(linear[0].array, *call.args[1:])[0])


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[0], [1], [0, 1], [-1], []])
def test_equal_extremes_share_a_tangent(name, dims, keepdim):
    """As torch's own derivative does."""
    array = torch.tensor([[3.0, 1, 3], [3, 1, 1]], dtype=torch.float64)
    call, (value,) = make_call(name, getattr(aten, name).default, X(array=array), dims, keepdim)
    frozen = freeze_call(call, call.compute())
    tangents = draw_tangents([value])
    _, expected = torch.func.jvp(
        lambda a: getattr(torch, name)(a, dims, keepdim), (array,), tangents
    )
    torch.testing.assert_close(push(frozen, [value], tangents), expected)


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_extreme_of_a_whole_tensor(name):
    call, (value,) = make_call(name, getattr(aten, name).default, X(3, 4))
    frozen = freeze_call(call, call.compute())
    tangents = draw_tangents([value])
    flat = value.array.flatten()
    expected = tangents[0].flatten()[getattr(flat, f"arg{name}")()]
    torch.testing.assert_close(push(frozen, [value], tangents), expected)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("kind", ["constant", "constant first", "same", "functions", "others"])
def test_the_larger_of_two(name, kind):
    target = getattr(aten, name).default
    other = draw(4, 6)
    if kind == "same":  # where it is 0, too
        array = torch.tensor([-1.0, 0, 2], dtype=torch.float64)
        same = X(array=array)
        call, values = make_call(name, target, same, same)
        value = freeze_call(call, call.compute())
        tangents = draw_tangents(values)
        torch.testing.assert_close(push(value, values, tangents), tangents[0])
        assert value.base == values[0].base and not value.is_gate
        return
    if kind.startswith("constant"):
        args = (x, other) if kind == "constant" else (other, x)
        call, values = make_call(name, target, *args)
        value = freeze_call(call, call.compute())
        tangents = draw_tangents(values)
        assert value.gate_of is values[0] and value.at_zero is None
        expected = tangents[0] * value.array / values[0].array
        torch.testing.assert_close(push(value, values, tangents), expected)
        return
    call, gates, (linear, _) = make_gates(name, target, x, X(4, 6))
    if kind == "functions":  # of one value: tanh(h) and h
        call.args[1] = linear
        gates[1] = linear
    value = freeze_call(call, call.compute())
    left, right = call.args
    tangents = draw_tangents(gates)
    compare = torch.ge if name == "maximum" else torch.le
    expected = torch.where(compare(left.array, right.array), *tangents)
    torch.testing.assert_close(push(value, gates, tangents), expected)
    if kind == "functions":
        assert value.base == linear.base and value.gate_of is linear
    else:
        assert value.base not in (left.base, right.base) and not value.is_gate


def test_a_choice_of_several_arguments_is_refused():
    call, _ = make_call("topk", aten.topk.default, x, X())
    is_refused(
        r"aten\.topk in a test depends on the start through",
        freeze_call,
        call,
        torch.topk(x.array, 2),
    )


def where(condition, first, second):
    """Returns the call of `where`, its result and its values; a function gives a value of h."""
    call, (linear,) = make_call("neg", aten.neg.default, x)
    made = []
    for part in (condition, first, second):
        if isinstance(part, str):
            name, *args = part.split()
            if name == "h":
                made.append(linear)
                continue
            target = getattr(aten, name)
            target = target.Scalar if args else target.default
            inner, _ = make_call(name, target, X(array=linear.array), *map(float, args))
            inner.args[0], inner.bases = linear, call.bases
            made.append(freeze_call(inner, inner.compute()))
        else:
            new, _ = make_call("where", aten.neg.default, part)
            made.append(new.args[0])
    call.name, call.target, call.args = "where", aten.where.self, made
    result = call.compute()
    return freeze_call(call, result), linear, made


SCALAR = torch.tensor(2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        (("gt 0", "h", SCALAR), "gate"),  # a frozen quotient times h
        (("gt 0", SCALAR, "h"), "gate"),
        (("gt 0", "tanh", SCALAR), "gate"),
        (("gt 0", "h", 0 * SCALAR), "branches"),  # relu
        (("gt 0", "tanh", 0 * SCALAR), "branches"),
        (("gt 0", "h", "tanh"), "branches"),
        (("gt 0", "sigmoid", "tanh"), "branches"),
        (("gt 0", "h", draw(4, 6)), "branches"),
        ((mask, "tanh", SCALAR), "branches"),
        ((mask, "h", SCALAR), "linear"),
    ],
)
def test_a_function_in_pieces(parts, kind):
    value, linear, (condition, *branches) = where(*parts)
    (tangent,) = draw_tangents([linear])
    assert value.base == linear.base
    assert value.gate_of is (None if kind == "linear" else linear)
    if kind == "gate":
        expected = tangent * value.array / linear.array
        torch.testing.assert_close(push(value, [linear], (tangent,)), expected)
        return
    tangents = [
        branch.push(tangent) if branch.is_gate else tangent if branch is linear else 0 * tangent
        for branch in branches
    ]
    depends = [branch for branch in branches if branch.degree]
    arguments = [t for t, branch in zip(tangents, branches, strict=True) if branch.degree]
    expected = torch.where(condition.array, *tangents)
    torch.testing.assert_close(push(value, depends, arguments), expected)


def test_a_piece_where_the_value_is_0_has_no_slope():
    """The jump of a function in pieces has no derivative: no path passes there."""
    call, (linear,) = make_call("gt", aten.gt.Scalar, X(array=torch.tensor([0.0, 2.0]).double()), 1)
    condition = freeze_call(call, call.compute())
    call.name, call.target = "where", aten.where.self
    (scalar,) = make_call("neg", aten.neg.default, SCALAR)[0].args
    call.args = [condition, linear, scalar]
    value = freeze_call(call, call.compute())
    assert value.array.tolist() == [2, 2]
    assert push(value, [linear], (torch.ones(2).double(),)).tolist() == [0, 1]


def test_entries_that_are_added_up_are_a_sum_and_no_move():
    """`index_put` with accumulate=True: a gate does not stay one."""
    places = [torch.tensor([1, 1, 0, 1])]
    call, gates, _ = make_gates(
        "index_put", aten.index_put.default, torch.zeros(2, 6).double(), places, x, True
    )
    value = freeze_call(call, call.compute())
    assert not value.is_gate
    tangents = draw_tangents(gates)
    expected = torch.zeros(2, 6).double().index_put(places, tangents[0], accumulate=True)
    torch.testing.assert_close(push(value, gates, tangents), expected)


@pytest.mark.parametrize(
    ("name", "target", "args", "kwargs"),
    [
        ("view", aten.view.dtype, (x, torch.int64), {}),
        (
            "scatter",
            aten.scatter.reduce,
            (draw(5, 6), 0, torch.tensor([[4] * 6] * 4), x),
            {"reduce": "multiply"},
        ),
    ],
)
def test_other_readings_of_entries_are_refused(name, target, args, kwargs):
    call, _ = make_call(name, target, *args)
    call.kwargs = kwargs
    result = torch.zeros(4, 6).double()
    is_refused(rf"aten\.{name} in a test reads a value that depends", freeze_call, call, result)
