"""Entries in other places: views, slices, `where`, and choices by value, which are frozen.

Values have degree 0 (constant or frozen), 1 (paths pass them) or 2 (a product of two values of
degree 1), see `values`.
"""

import torch
from torch import Tensor

from rank_collapse.torch.calls import list_values, split_results
from rank_collapse.torch.frozen_values import (
    apply_entrywise,
    make_gate,
    make_scores,
    make_value,
    push_linear,
    push_through,
)
from rank_collapse.torch.operators import (
    MOVES,
)
from rank_collapse.torch.refusals import refuse_argument, refuse_operator
from rank_collapse.torch.values import Value, is_floating


def move_entries(call, result):
    """Return the results of an operator that puts entries in other places, such as a view or a
    slice.

    Path sums move alike. A non-linear entrywise function f(h) stays one: of the moved h.

    Args:
        call: The operator, with its arguments.
        result: Its result, a tensor or several.
    """
    positions = MOVES[call.name]
    accumulates = call.name == "index_put" and call.argument(3, False)
    if accumulates:
        return push_through(call, result, positions)
    if call.target is torch.ops.aten.view.dtype or "reduce" in call.kwargs:
        refuse_operator(call)
    dependent = call.dependent
    count = len(result) if isinstance(result, list | tuple) else 1
    base = call.bases.after(call.move_key(), *(v.base for v in dependent))
    bases = [call.bases.after(i, base) for i in range(count)] if count > 1 else [base]
    if call.name == "where":
        same = {v.base for v in call.values if v.base is not None}
        if len(same) == 1 and {v.shape for v in dependent} == {result.shape}:
            return _piecewise(call, result, same.pop())
    if call.name in ("_to_copy", "clone", "alias"):
        bases = [dependent[0].base]
    roots = _move_roots(call, positions, dependent, count)
    values = push_through(call, result, positions, bases=bases, roots=roots)
    if len(dependent) == 1:
        for value in list_values(values):
            value.summed_base, value.at_zero = dependent[0].summed_base, dependent[0].at_zero
    return values


def _move_roots(call, positions, dependent, count):
    """For results that are entrywise functions f(h), move the value h.

    Args:
        call: An operator that moves entries.
        positions: Positions of the arguments whose entries it moves.
        dependent: Values among these arguments.
        count: Number of results.

    Returns:
        The moved h of each result; None where an argument is not a non-linear entrywise function.
    """
    if not all(v.is_gate for v in dependent):
        return None
    gates = tuple(dependent)
    roots = tuple(gate.gate_of for gate in gates)
    moved = call.compute_linear(positions, gates, tuple(root.array for root in roots))

    def make_root(array, index):
        """Makes the value h of a result."""
        push = push_linear(call, positions, gates, index)
        return make_value(call, array, sources=roots, push=push)

    if not isinstance(moved, list | tuple):
        return [make_root(moved, None)]
    return [make_root(array, index) for index, array in enumerate(moved)]


def _piecewise(call, result, base):
    """Return the result of `where` whose condition and branches are functions of the same value h.

    If one branch depends on h and the other is a scalar other than 0, the result is a gate: its
    quotient by h, which is frozen, times h. Otherwise the condition is frozen, and paths pass the
    branches.

    Args:
        call: The operator `where`, with its arguments.
        result: Its result.
        base: The number which all entrywise functions of h share.
    """
    condition, *branches = (call.get(i) for i in range(3))
    depends = [v for v in branches if isinstance(v, Value) and v.degree == 1]
    if len(depends) != len(call.dependent):
        return push_through(call, result, (1, 2))
    is_function = isinstance(condition, Value) and condition.base == base
    gate = depends[0].root if is_function else None
    for value in depends:
        if value.is_gate:
            gate = value.gate_of
            break
    if gate is not None and is_function and len(depends) == 1:
        position = 2 if branches[0] is depends[0] else 1  # of the branch that is a constant
        is_scalar = call.get(position).shape == ()
        if is_scalar and call.argument(position, 0) != 0:
            return make_gate(call, result, gate, base)
    return push_through(call, result, (1, 2), bases=[base], roots=[gate])


def choose_entries(call, result):
    """Return entries picked by their own values, such as a maximum; the choice is frozen.

    Args:
        call: A maximum of two arguments; the extreme of a tensor or of its axes, which equal
            entries share; or entries with their indices (topk, sort, pooling).
        result: Its result: a tensor, or the picked entries and their indices.
    """
    if any(v.degree == 2 for v in call.dependent):  # scores: only their softmax may be used
        arrays = [
            make_scores(call, array) if is_floating(array) else call.constant(array)
            for _, array in split_results(result)
        ]
        return arrays if isinstance(result, list | tuple) else arrays[0]
    if call.name in ("maximum", "minimum"):
        return _larger(call, result)
    value = call.get(0)
    if len(call.dependent) != 1 or call.dependent[0] is not value:
        refuse_argument(call)
    array = value.array
    if isinstance(result, Tensor):  # amax, amin and the extremes of a whole tensor
        dims = call.argument(1, None) or list(range(array.ndim))
        keepdim = call.argument(2, False)
        expanded = result if keepdim else _expand_dims(result, dims, array.ndim)
        chosen = (array == expanded).to(array.dtype)
        shares = chosen / chosen.sum(dims, keepdim=True)
        return make_value(
            call, result, sources=(value,), push=lambda t: (t * shares).sum(dims, keepdim)
        )
    chosen, indices = result

    # `dim` is the third argument of topk(x, k, dim) and kthvalue(x, k, dim), else the second.
    position_of_dim = 2 if call.name in ("topk", "kthvalue") else 1

    def pick(tangent):
        """Picks the entries of a tangent at the chosen indices."""
        if call.name == "max_pool2d_with_indices":  # indices [..., h, w] into flattened images
            picked = tangent.flatten(-2).gather(-1, indices.flatten(-2))
            return picked.view(indices.shape)
        dim = call.argument(position_of_dim, call.kwargs.get("dim", -1))
        if indices.ndim < tangent.ndim:  # keepdim=False
            return tangent.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        return tangent.gather(dim, indices)

    base = call.bases.after(("chosen", id(indices)), value.base)
    root = value.gate_of
    if root is not None:
        root = make_value(call, pick(root.array), sources=(root,), push=pick)
    values = make_value(call, chosen, base=base, gate_of=root, sources=(value,), push=pick)
    return [values, call.constant(indices)]


def _expand_dims(array, dims, ndim):
    """Put back the dimensions that a reduction removed, each with length 1.

    Args:
        array: The reduced tensor.
        dims: The removed dimensions.
        ndim: Number of dimensions before the reduction.
    """
    for dim in sorted(dim % ndim for dim in dims):
        array = array.unsqueeze(dim)
    return array


def _larger(call, result):
    """Return the entrywise maximum or minimum of two arguments, of which at least one depends on
    the state.

    Which argument is taken is frozen for each entry, so the result passes the path sums of the
    taken one. A maximum with a constant is an entrywise function, as ReLU. If both arguments are
    entrywise functions of one value h, so is the result (`base`, and `gate_of` = h, mark it as
    such).

    Args:
        call: The operator, with its two arguments.
        result: Its result.
    """
    left, right = call.get(0), call.get(1)
    if left is right:
        fields = {"base": left.base, "gate_of": left.gate_of, "at_zero": left.at_zero}
        return make_value(call, result, sources=(left,), push=lambda t: t, **fields)
    if len(call.dependent) == 1:
        return apply_entrywise(call, result, 0 if call.dependent[0] is left else 1)
    takes_left = left.array == result

    def push(left_tangent, right_tangent):
        """Takes each entry from the path sums of the argument that was taken."""
        return torch.where(takes_left, left_tangent, right_tangent)

    fields = {}
    if left.base == right.base and left.shape == right.shape:
        root = next((v.gate_of for v in (left, right) if v.is_gate), left)
        fields = {"base": left.base, "gate_of": root}
    return make_value(call, result, sources=(left, right), push=push, **fields)
