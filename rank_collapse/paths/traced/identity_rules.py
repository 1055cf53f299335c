"""What a value contains of earlier values: unchanged in their places, averaged, or bent.

A residual sum x + f(x) contains x in its place, and something that was computed from x. Scalings,
masks, norms, moves of entries and functions of each entry keep both. A contraction keeps neither.
"""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.dominators import Node, dominates, meet
from rank_collapse.paths.traced.values import is_inexact

_NUM_RECENT = 12  # shares in values of the same branch that are kept
_NUM_SUMS = 4
_PAIRWISE = frozenset(("add", "sub", "add_any", "scatter-add", "scatter_add"))
_FUNCTIONS = primitives.UNARY | {"pow", "atan2", "rem", "nextafter", "clamp", "max", "min"}
_COPIES = primitives.STRUCTURAL | {"neg", "real", "imag", "conj", "complex"}


class Share(enum.IntEnum):
    """How a value contains an earlier one."""

    IN_PLACE = 0  # scaled by what is constant or frozen
    AVERAGED = 1  # summed over entries
    BENT = 2  # as a function of each entry


class Residual(NamedTuple):
    """A sum x + f(x) that a value contains.

    Attributes:
        stream: x.
        eqn: The sum.
        calls: The calls around it, from the outermost.
        scopes: Names of the scopes of the sum.
        added_in: Names of the scopes in which f(x) was computed.
        branch: The branch that the sum is inside of; None for none.
    """

    stream: Node
    eqn: JaxprEqn
    calls: tuple[JaxprEqn, ...]
    scopes: tuple[str, ...]
    added_in: tuple[str, ...]
    branch: object


class Content(NamedTuple):
    """What a value contains.

    Attributes:
        node: The value on the ways from the input; None for a constant.
        shares: {earlier value: how it is contained}.
        residuals: The sums x + f(x) that it contains.
        is_bent: Whether it is the result of nonlinear functions, which a product freezes.
        made_in: Names of the scopes in which it was computed.
    """

    node: Node | None = None
    shares: dict[Node, Share] = {}
    residuals: tuple[Residual, ...] = ()
    is_bent: bool = False
    made_in: tuple[str, ...] = ()


class Place(NamedTuple):
    """An equation, the names of its scopes, the branch and the calls it is inside of."""

    eqn: JaxprEqn
    scopes: tuple[str, ...]
    branch: object
    calls: tuple[JaxprEqn, ...] = ()


def make_content(
    place: Place,
    parts: Sequence[Content],
    shares: dict[Node, Share] | None = None,
    **more: object,
) -> Content:
    """Return the content of a new value.

    Args:
        place: Its equation.
        parts: The values that it was computed from; at least one depends on the input.
        shares: See `Content`; the value itself is added.
        **more: Other attributes; `made_in` is the place of the equation.
    """
    node = Node(meet(p.node for p in parts if p.node), place.branch)
    recent = sorted(shares or {}, key=lambda n: -n.number)
    kept = [
        n
        for i, n in enumerate(recent)
        if i < _NUM_RECENT or n.branch is not place.branch is not None
    ]
    shares = {n: shares[n] for n in kept} | {node: Share.IN_PLACE}
    return Content(node, shares, **{"made_in": place.scopes} | more)


def follow(place: Place, values: Sequence[Content]) -> list[Content]:
    """Return the contents of the results of an equation that has no program inside.

    Args:
        place: The equation.
        values: Contents of its arguments.
    """
    eqn, name = place.eqn, place.eqn.primitive.name
    if name == "stop_gradient":
        return [Content() for _ in eqn.outvars]
    if name == "optimization_barrier":
        return list(values)
    outs = [_choose_rule(eqn, name)(place, values)] * len(eqn.outvars)
    return [
        out if is_inexact(v.aval) else _make_choice(values)
        for out, v in zip(outs, eqn.outvars, strict=True)
    ]


def _choose_rule(eqn, name) -> Callable[[Place, Sequence[Content]], Content]:
    """Return the rule of a primitive."""
    if name in _COPIES:
        return lambda place, values: values[0]
    if name in _PAIRWISE or name in primitives.SELECTING:
        return _add
    if name == "select_n":
        return _select
    if name == "integer_pow" and eqn.params["y"] == 1:
        return lambda place, values: values[0]
    if name in _FUNCTIONS:
        return _bend
    if name in ("mul", "div") or (name == "dot_general" and _only_multiplies(eqn)):
        return _multiply
    if name in primitives.LINEAR and name != "fft":
        return _average
    return _compute


def _make_choice(values):
    """Return the content of a mask or of indices: no path goes through it."""
    bent = {n: Share.BENT for v in values for n, s in v.shares.items() if s != Share.AVERAGED}
    return Content(shares=bent)


def _compute(place, values):
    """Return a result that contains none of its arguments."""
    if not any(v.node for v in values):
        return Content()
    is_bent = place.eqn.primitive.name in primitives.STATISTICS
    return make_content(place, values, is_bent=is_bent)


def join_residuals(values: Sequence[Content]) -> tuple[Residual, ...]:
    """List the residual sums in several values, the earliest first.

    Args:
        values: Contents of the values.
    """
    return tuple(dict.fromkeys(r for v in values for r in v.residuals))[:_NUM_SUMS]


def _add(place, values):
    """Return a sum, or a join of entries."""
    parts = [v for v in values if v.node]
    if len({p.node for p in parts}) <= 1:
        return parts[0] if parts else Content()
    shares = {}
    for node in {n: None for p in parts for n in p.shares}:
        present = [p.shares.get(node) for p in parts]
        levels = {share for share in present if share is not None}
        if Share.BENT in levels:
            if None not in present:
                shares[node] = Share.BENT
        elif Share.IN_PLACE in levels or None not in present:
            shares[node] = min(levels)
    additions = [
        Residual(node, place.eqn, place.calls, place.scopes, other.made_in, place.branch)
        for part in parts
        for node, share in part.shares.items()
        if share == Share.IN_PLACE and (place.branch is None or node.branch is not place.branch)
        for other in parts
        if node not in other.shares and _is_computed(other, node, place.branch)
    ]
    # The value nearest to the sum is the stream; at the input of a branch, any of its names.
    additions = sorted(additions, key=lambda r: -r.stream.number)[:1]
    residuals = (*join_residuals(parts), *additions)[:_NUM_SUMS]
    is_bent = all(p.is_bent for p in parts)
    return make_content(place, parts, shares, residuals=residuals, is_bent=is_bent)


def _is_computed(other, stream, branch):
    """Whether a summand was computed in the branch, or from the stream."""
    if branch is not None and all(n.branch is branch for n in other.shares):
        return True
    return dominates(stream, other.node)


def _select(place, values):
    """Return a choice by a mask: the sum of what the mask leaves of each case."""
    mask, *cases = values
    out = _add(place, cases)
    shared = mask.shares.keys() & out.shares.keys()
    if out.node is None or not shared:
        return out
    shares = out.shares | dict.fromkeys(shared, Share.BENT)
    return make_content(place, cases, shares, residuals=out.residuals, is_bent=True)


def _bend(place, values):
    """Return a nonlinear function of the entries of several values at the same place."""
    parts = [v for v in values if v.node]
    if not parts:
        return Content()
    shared = set.intersection(*(_pointwise(p) for p in parts))
    is_weight = place.eqn.primitive.name in primitives.EXPONENTIALS
    residuals = () if is_weight else join_residuals(parts)
    return make_content(
        place, parts, dict.fromkeys(shared, Share.BENT), residuals=residuals, is_bent=True
    )


def _pointwise(content):
    """Return the values of whose entries, each for itself, a value is a function."""
    return {n for n, share in content.shares.items() if share != Share.AVERAGED}


def _multiply(place, values):
    """Return a product: what is frozen of it scales the other factor."""
    first, second = values[:2]
    parts = [v for v in (first, second) if v.node]
    is_quotient = place.eqn.primitive.name == "div"
    if not parts or (len(parts) == 1 and not (is_quotient and second.node)):
        return parts[0] if parts else Content()
    if len(parts) == 1:
        return _bend(place, parts)
    shares = dict.fromkeys(_pointwise(first) & _pointwise(second), Share.BENT)
    kept = []
    for part, other in ((first, second), (second, first)):
        is_fixed = other is second if is_quotient else other.is_bent and not part.is_bent
        if is_fixed:
            kept.append(part)
            shares |= {n: s for n, s in part.shares.items() if n not in other.shares}
    residuals = join_residuals(kept or (parts if shares else ()))
    is_bent = first.is_bent and second.is_bent
    made_in = kept[0].made_in if kept else place.scopes
    return make_content(place, parts, shares, residuals=residuals, is_bent=is_bent, made_in=made_in)


def _only_multiplies(eqn):
    """Whether a contraction sums over single entries, such as einsum("nd,d->nd")."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)


def _average(place, values):
    """Return sums over entries."""
    parts = [v for v in values if v.node]
    if not parts:
        return Content()
    eqn, name = place.eqn, place.eqn.primitive.name
    if name == "reduce_sum" and all(eqn.invars[0].aval.shape[a] == 1 for a in eqn.params["axes"]):
        return parts[0]
    shares = {
        n: Share.AVERAGED for p in parts for n, share in p.shares.items() if share != Share.BENT
    }
    return make_content(
        place,
        parts,
        shares,
        residuals=join_residuals(parts),
        is_bent=all(p.is_bent for p in parts),
        made_in=parts[0].made_in,
    )
