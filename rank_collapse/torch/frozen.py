"""What one operator makes of values once the choices of the pass are frozen.

Softmax weights, norm statistics and denominators are constants. A non-linear entrywise function is
the frozen gate f(h)/h times h, and f'(0) times h where h is 0. Of a gate times another value, entry
by entry, the gate is frozen. Other products of two values have degree 2.
"""

from typing import Any

import torch
from torch import Tensor

from rank_collapse.torch.calls import Call, has_floating, list_values, split_results
from rank_collapse.torch.operators import (
    CHOICES,
    COMPARISONS,
    CONSTANTS,
    ENTRYWISE,
    KERNELS,
    MOVES,
    NORMS,
    PRODUCTS,
    STATISTICS,
    SUMS,
)
from rank_collapse.torch.refusals import describe, refuse_argument, refuse_kernel, refuse_operator
from rank_collapse.torch.values import Value, is_floating

_KEEPS_ENTRIES = COMPARISONS | {"mul", "add", "sub", "div", "where", "_to_copy", "clone", "alias"}


def freeze_call(call: Call, result: Any) -> Any:
    """Return the values of an operator's results.

    Args:
        call: The operator; at least one of its arguments or results is a tensor.
        result: What the model computes.

    Raises:
        ValueError: An operator that is in no table reads a value that depends on the state.
    """
    name = call.name
    if not call.dependent:
        product = None if name in STATISTICS or name in CONSTANTS else call.product
        return call.constant(result, _base_of_constant(call, result), product)
    if name in CONSTANTS or (not has_floating(result) and name != "_assert_scalar"):
        return call.constant(result, _base_of_constant(call, result))
    if name in STATISTICS:
        return call.constant(result)
    if name in KERNELS:
        refuse_kernel(call)
    if name == "pow":
        return _power(call, result)
    if name in ENTRYWISE:
        return _entrywise(call, result, ENTRYWISE[name][0])
    if name == "div":
        return _quotient(call, result)
    if name in ("add", "sub", "rsub"):
        return _sum(call, result)
    if name == "neg":
        return _negate(call, result)
    if name in MOVES:
        return _move(call, result)
    if name in SUMS:
        return _linear(call, result, SUMS[name], summed=name == "sum")
    if name in PRODUCTS:
        return _product(call, result)
    if name in CHOICES:
        return _choice(call, result)
    if name in NORMS:
        return _norm(call, result)
    return refuse_operator(call)


def _base_of_constant(call, result):
    """Return the base of a frozen function of one value, such as h > 0, or None."""
    bases = {v.base for v in call.values if v.base is not None}
    if len(bases) != 1 or not isinstance(result, Tensor):
        return None
    (base,) = bases
    if call.name in ENTRYWISE or call.name in _KEEPS_ENTRIES:
        shapes = {v.shape for v in call.values if v.base == base}
        return base if shapes == {result.shape} else None
    if call.name in MOVES:
        return call.bases.after(call.move_key(), base)
    return None


def _make(call, array, degree=1, **fields):
    """Make a value that depends on the state, with a base of its own unless one is named."""
    fields.setdefault("base", call.bases.new())
    return Value(array, degree, any(v.from_inputs for v in call.values), **fields)


def _scores(call, array, product=None):
    """Make a value of degree 2."""
    return _make(call, array, 2, product=product or call.product)


def _linear(call, result, positions, *, summed=False, bases=None, roots=None):
    """Return the results of an operator that is linear in the arguments at `positions`.

    Args:
        summed: Whether it is a sum over entries.
        bases, roots: For each result the base and the value that it is a gate of, or None.
    """
    sources = list_sources(call, positions)
    values = []
    for index, array in split_results(result):
        fields = {} if bases is None else {"base": bases[index or 0]}
        if not is_floating(array):
            values.append(call.constant(array))
        elif call.product is not None:
            values.append(_scores(call, array))
        else:
            root = None if roots is None else roots[index or 0]
            summed_base = sources[0].base if summed and len(sources) == 1 else None
            push = _push_linear(call, positions, sources, index)
            fields |= {"gate_of": root, "summed_base": summed_base}
            values.append(_make(call, array, sources=sources, push=push, **fields))
    return values if isinstance(result, list | tuple) else values[0]


def list_sources(call: Call, positions: tuple[int, ...]) -> tuple[Value, ...]:
    """List the values that an operator depends on, all of them among the arguments at `positions`.

    Raises:
        ValueError: Another argument depends on the state too.
    """
    linear = [arg for i, arg in enumerate(call.args) if i in positions]
    sources = {id(v): v for v in list_values(linear) if v.degree}
    if len(sources) != len(call.dependent):
        refuse_argument(call)
    return tuple(sources.values())


def _push_linear(call, positions, sources, index):
    def push(*tangents):
        result = call.compute_linear(positions, sources, tangents)
        return result if index is None else result[index]

    return push


def _move(call, result):
    """Return entries in other places: gates stay gates, entrywise functions stay entrywise."""
    positions = MOVES[call.name]
    accumulates = call.name == "index_put" and call.argument(3, False)
    if accumulates:
        return _linear(call, result, positions)
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
    values = _linear(call, result, positions, bases=bases, roots=roots)
    if len(dependent) == 1:
        for value in list_values(values):
            value.summed_base, value.at_zero = dependent[0].summed_base, dependent[0].at_zero
    return values


def _move_roots(call, positions, dependent, count):
    """Move the values that gates are gates of, for each result; None where one is no gate."""
    if not all(v.is_gate for v in dependent):
        return None
    gates = tuple(dependent)
    moved = call.compute_linear(positions, gates, tuple(v.gate_of.array for v in gates))
    has_many = isinstance(moved, list | tuple)
    arrays = moved if has_many else [moved]
    return [
        _make(
            call,
            array,
            sources=tuple(v.gate_of for v in gates),
            push=_push_linear(
                call, positions, gates, index if isinstance(moved, list | tuple) else None
            ),
        )
        for index, array in enumerate(arrays)
    ]


def _piecewise(call, result, base):
    """Return `where` whose condition and branches are functions of the same value."""
    condition, *branches = (call.get(i) for i in range(3))
    depends = [v for v in branches if isinstance(v, Value) and v.degree == 1]
    if len(depends) != len(call.dependent):
        return _linear(call, result, (1, 2))
    is_function = isinstance(condition, Value) and condition.base == base
    gate = next((v.gate_of for v in depends if v.is_gate), depends[0].root if is_function else None)
    if gate is not None and len(depends) == 1:
        other = next(v for v in branches if v is not depends[0])
        if is_function and other.shape == () and call.argument(branches.index(other) + 1, 0) != 0:
            return _gate(call, result, gate, base)
    return _linear(call, result, (1, 2), bases=[base], roots=[gate])


def _gate(call, result, root, base, slope=None):
    """Return a non-linear entrywise function of `root`: a frozen quotient times it.

    Args:
        slope: Computes the derivative of the function, for where `root` is 0.
    """
    at_zero = _evaluate_at_zero(call)

    def push(tangent):
        is_zero = root.array == 0
        quotient = result / torch.where(is_zero, torch.ones_like(root.array), root.array)
        slopes = torch.zeros_like(quotient) if slope is None else slope()
        return (tangent * torch.where(is_zero, slopes, quotient)).to(result.dtype)

    fields = {"base": base, "gate_of": root, "at_zero": at_zero}
    return _make(call, result, sources=(root,), push=push, **fields)


def _evaluate_at_zero(call):
    """Compute an entrywise function of one value h where h is 0; None if that is not known."""
    dependent = call.dependent
    numbers = [0.0 if v.gate_of is None else v.at_zero for v in dependent]
    if None in numbers or any(v.shape != () for v in call.values if not v.degree):
        return None
    zeros = [v.array.new_full((), n) for v, n in zip(dependent, numbers, strict=True)]
    result = call.compute_replacing(tuple(dependent), tuple(zeros))
    is_known = not result.is_complex() and bool(torch.isfinite(result))
    return float(result) if is_known else None


def _entrywise(call, result, position):
    """Return a non-linear entrywise function of the argument at `position`."""
    dependent = call.dependent
    value = call.get(position)
    if len(dependent) != 1 or dependent[0] is not value:
        refuse_argument(call)
    if value.degree == 2:
        return call.constant(result, product=value.product)
    slope = None
    if value.gate_of is None:

        def slope():
            def function(array):
                return call.compute_with({position: array})

            slopes, pull = torch.func.vjp(function, value.array)
            return pull(torch.ones_like(slopes))[0]

    base = value.base if value.shape == result.shape else call.bases.new()
    return _gate(call, result, value.root, base, slope)


def _power(call, result):
    """Return a power: linear for exponent 1, a constant for 0, else a gate."""
    exponent = call.argument(1, None)
    if isinstance(call.get(1), Value) and call.get(1).degree:
        if isinstance(call.get(0), Value) and call.get(0).degree:
            refuse_argument(call)
        return _entrywise(call, result, 1)
    if not isinstance(exponent, Tensor) and exponent == 1:
        bases, roots = [call.get(0).base], [call.get(0).gate_of]
        return _linear(call, result, (0,), bases=bases, roots=roots)
    if not isinstance(exponent, Tensor) and exponent == 0:
        return call.constant(result)
    return _entrywise(call, result, 0)


def _sum(call, result):
    """Return a sum or difference of two arguments."""
    dependent, (left, right) = call.dependent, (call.get(0), call.get(1))
    if call.product is not None:
        return _scores(call, result)
    value = dependent[0]
    keeps_shape = all(v.shape == result.shape for v in dependent)
    if not keeps_shape or len({v.base for v in dependent}) > 1:
        return _linear(call, result, (0, 1))
    gate = next((v.gate_of for v in dependent if v.is_gate), None)
    if len(dependent) == 1:
        other = right if value is left else left
        is_scalar = not isinstance(other, Value) or other.shape == ()
        if value.is_weight and is_scalar:
            # A number that is added to exp(-h) belongs to the function; to gelu(h) it is a bias.
            return _gate(call, result, gate, value.base)
        if value.summed_base is not None and is_scalar:
            total = _linear(call, result, (0, 1))
            total.summed_base = value.summed_base
            return total
    total = _linear(call, result, (0, 1), bases=[value.base], roots=[gate])
    total.at_zero = None if gate is None else _evaluate_at_zero(call)
    return total


def _negate(call, result):
    """Return a value with the opposite sign."""
    value = call.get(0)
    negated = _linear(call, result, (0,), bases=[value.base], roots=[value.gate_of])
    negated.at_zero = None if value.at_zero is None else -value.at_zero
    return negated


def _product(call, result):
    """Return a product of two arguments, plus a third."""
    rule = PRODUCTS[call.name]
    left, right = (call.get(i) for i in (rule.left, rule.right))
    depends = [isinstance(v, Value) and v.degree > 0 for v in (left, right)]
    if any(v.degree == 2 for v in call.dependent):
        return _scores(call, result)
    if not all(depends):
        position = rule.right if depends[1] else rule.left
        return _scaled(call, result, rule, position)
    if not rule.entrywise:
        if left.is_weight != right.is_weight:  # weights that are written out, not yet divided
            return _carry(call, result, rule, rule.right if left.is_weight else rule.left)
        return _scores(call, result, describe(call))
    if left.base == right.base and left.shape == right.shape:
        # The product of two functions of the same value is one, and a gate.
        position = rule.right if left.is_gate and not right.is_gate else rule.left
        carrier = call.get(position)
        root = next((v.gate_of for v in (left, right) if v.is_gate), carrier)
        fields = {"base": left.base, "gate_of": root, "at_zero": _evaluate_at_zero(call)}
        return _carry(call, result, rule, position, **fields)
    is_scale = [v.is_gate for v in (left, right)]
    if all(is_scale):  # sigmoid(a) tanh(b): that with f(0) ≠ 0 scales the activation
        is_scale = [left.is_weight, right.is_weight]
    if is_scale[0] != is_scale[1]:
        position = rule.right if is_scale[0] else rule.left
        if call.get(position).shape == result.shape:
            return _carry(call, result, rule, position)
    return _scores(call, result, describe(call))


def _scaled(call, result, rule, position):
    """Return a product with a constant."""
    value, factor = call.get(position), call.get(rule.left + rule.right - position)
    if not rule.entrywise or not (isinstance(value, Value) and value.degree):
        return _carry(call, result, rule, position)
    is_scalar = not isinstance(factor, Value) or factor.shape == ()
    keeps_shape = value.shape == result.shape
    root = value.gate_of
    if root is None and keeps_shape and isinstance(factor, Value) and factor.base == value.base:
        root = value
    fields = {"gate_of": root, "summed_base": value.summed_base if is_scalar else None}
    if keeps_shape:
        fields["base"] = value.base
    if root is value:
        fields["at_zero"] = 0.0
    elif root is not None:
        fields["at_zero"] = _evaluate_at_zero(call) if is_scalar else value.at_zero
    return _carry(call, result, rule, position, **fields)


def _carry(call, result, rule, position, **fields):
    """Return a product in which the argument at `position` carries paths, the other is frozen."""
    carrier, added = call.get(position), None if rule.added is None else call.get(rule.added)
    sources = tuple(v for v in (carrier, added) if isinstance(v, Value) and v.degree)

    def push(*tangents):
        arrays = {position: torch.zeros_like(carrier.array)}
        if rule.added is not None and isinstance(added, Value):
            arrays[rule.added] = torch.zeros_like(added.array)
        places = [position] if carrier in sources else []
        places += [rule.added] if added in sources else []
        return call.compute_with(arrays | dict(zip(places, tangents, strict=True)))

    batched = rule.batched
    return _make(call, result, sources=sources, push=push, batched=batched, **fields)


def _quotient(call, result):
    """Return a quotient; a denominator that depends on the state is frozen."""
    above, below = call.get(0), call.get(1)
    if call.kwargs.get("rounding_mode") is not None:
        return _entrywise(call, result, 0)
    if not (isinstance(above, Value) and above.degree):
        return _entrywise(call, result, 1)
    if above.degree == 2:
        return _scores(call, result)
    fields: dict[str, Any] = {"gate_of": above.gate_of}
    keeps_shape = above.shape == result.shape
    if isinstance(below, Value) and below.degree:
        if above.is_gate and below.summed_base == above.base:
            return call.constant(result)  # a softmax that is written out
        if below.base == above.base and below.shape == above.shape:
            root = next((v.gate_of for v in (above, below) if v.is_gate), above)
            fields = {"gate_of": root, "base": above.base, "at_zero": _evaluate_at_zero(call)}
    elif keeps_shape:
        fields["base"] = above.base
        is_function = isinstance(below, Value) and below.base == above.base
        fields["gate_of"] = above.root if is_function else above.gate_of
        if above.is_gate:
            fields["at_zero"] = above.at_zero
        if not isinstance(below, Value) or below.shape == ():
            fields["summed_base"] = above.summed_base

    def push(tangent):
        return call.compute_with({0: tangent})

    return _make(call, result, sources=(above,), push=push, **fields)


def _choice(call, result):
    """Return entries picked by their own values, such as a maximum; the choice is frozen."""
    if any(v.degree == 2 for v in call.dependent):
        arrays = [
            _scores(call, array) if is_floating(array) else call.constant(array)
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
        return _make(call, result, sources=(value,), push=lambda t: (t * shares).sum(dims, keepdim))
    chosen, indices = result

    def pick(tangent):
        if call.name == "max_pool2d_with_indices":
            return tangent.flatten(-2).gather(-1, indices.flatten(-2)).view(indices.shape)
        position = {"topk": 2, "kthvalue": 2}.get(call.name, 1)
        dim = call.argument(position, call.kwargs.get("dim", -1))
        if indices.ndim < tangent.ndim:
            return tangent.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        return tangent.gather(dim, indices) if tangent.ndim else tangent

    base = call.bases.after(("chosen", id(indices)), value.base)
    root = value.gate_of
    if root is not None:
        root = _make(call, pick(root.array), sources=(root,), push=pick)
    values = _make(call, chosen, base=base, gate_of=root, sources=(value,), push=pick)
    return [values, call.constant(indices)]


def _expand_dims(array, dims, ndim):
    """Put back the dimensions that a reduction removed."""
    for dim in sorted(dim % ndim for dim in dims):
        array = array.unsqueeze(dim)
    return array


def _larger(call, result):
    """Return the entrywise maximum or minimum of two arguments; which one is frozen."""
    left, right = call.get(0), call.get(1)
    if len(call.dependent) == 1:
        return _entrywise(call, result, 0 if call.dependent[0] is left else 1)
    takes_left = left.array == result

    def push(left_tangent, right_tangent):
        return torch.where(takes_left, left_tangent, right_tangent)

    if left is right:
        return _make(call, result, sources=(left,), push=lambda t: t, base=left.base)
    fields = {}
    if left.base == right.base and left.shape == right.shape:
        root = next((v.gate_of for v in (left, right) if v.is_gate), left)
        fields = {"base": left.base, "gate_of": root}
    return _make(call, result, sources=(left, right), push=push, **fields)


def _norm(call, result):
    """Return a norm's results: its statistics are frozen, its mean is linear."""
    value = call.get(0)
    if len(call.dependent) != 1 or call.dependent[0] is not value:
        refuse_argument(call)
    if value.degree == 2:
        return [_scores(call, result[0]), *call.constant(result[1:], product=value.product)]
    push_first, push_mean = None, None
    gain = call.argument(1, None)
    if call.name == "var_mean":
        dims, keepdim = call.argument(1, None), call.kwargs.get("keepdim", False)
        dims = list(range(value.array.ndim)) if dims is None else dims

        def push_mean(tangent):
            return tangent.mean(dims, keepdim)

    elif call.name == "native_layer_norm":
        gain, dims = call.argument(2, None), list(range(-len(call.argument(1, [])), 0))

        def push_mean(tangent):
            return tangent.mean(dims, keepdim=True)

        def push_first(tangent):
            return _times((tangent - push_mean(tangent)) * result[2], gain)

    elif call.name == "native_group_norm":
        batch, groups = call.argument(3, 1), call.argument(6, 1)

        def push_mean(tangent):
            return tangent.reshape(batch, groups, -1).mean(-1)

        def push_first(tangent):
            grouped = tangent.reshape(batch, groups, -1)
            centred = (grouped - grouped.mean(-1, keepdim=True)) * result[2][..., None]
            return _times(centred.reshape(value.shape), _channels(gain, value.shape))

    elif call.name == "_fused_rms_norm":
        gain = call.argument(2, None)

        def push_first(tangent):
            return _times(tangent * result[1], gain)

    else:
        scale = torch.rsqrt(call.argument(4, None) + call.argument(6, 0.0))

        def push_first(tangent):
            scaled = tangent * _channels(scale, value.shape)
            return _times(scaled, _channels(gain, value.shape))

    values = call.constant(result)
    for index, push in enumerate((push_first, push_mean)):
        if push is not None:
            values[index] = _make(call, result[index], sources=(value,), push=push)
    return values


def _channels(array, shape):
    """Shape a number per channel, the second axis, for arrays of `shape`."""
    return None if array is None else array.reshape(1, -1, *(1,) * (len(shape) - 2))


def _times(array, gain):
    return array if gain is None else array * gain
