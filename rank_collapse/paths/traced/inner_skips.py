"""Branches that contain their own skip connection, found while their paths are summed.

All paths go through such a branch, a whole layer x + f(x), so that all of them would have the
longest length. Sums of paths therefore keep a `Trail`. A state is in place in a value that moves or
scales its entries (as norms and gates do), centres them, or adds other values to them. A branch
contains its skip if a state from outside is in place in its output, added to a value that was
computed from the same state.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.programs import Scope

_KEEPING = primitives.STRUCTURAL | {"neg", "real", "imag", "conj", "optimization_barrier"}
_JOINING = primitives.SELECTING | {"add", "sub", "add_any", "scatter-add", "scatter_add"}
_JOINING |= {"select_n", "max", "min", "complex"}
_BENDING = primitives.UNARY | {"pow", "rem", "clamp", "max", "min", "custom_jvp_call"}


class Mark:
    """A state outside of all branches.

    Args:
        is_stream: Whether it is a state of the residual stream, or leaves a branch.
        before: The sources of what the branch returned.
    """

    def __init__(self, is_stream: bool = False, before: frozenset = frozenset()):
        self.is_stream, self.before = is_stream, before


class Skip(NamedTuple):
    """A sum of a state and of what was computed from it.

    Attributes:
        branch: The branch that the sum is inside of; None for none.
        place: Position of the sum in the caller's code.
        inside: The name of a scope of what is added, inside the scope of the sum; None for none.
    """

    branch: Any
    place: str
    inside: str | None


@dataclasses.dataclass(frozen=True)
class Trail:
    """What sums of paths contain, and where they come from.

    Attributes:
        in_place: Marks of the states that are in place; ("bent", mark) for a function of each
            entry.
        sources: Marks of all states on the paths since the last state of the residual stream.
        skip: The residual sum that is in place.
        made_in: The names of the scopes in which the value was computed.
        inner: A branch that contains its skip, and the skip, if all paths go through such branches.
    """

    in_place: frozenset = frozenset()
    sources: frozenset = dataclasses.field(default=frozenset(), compare=False)
    skip: Skip | None = dataclasses.field(default=None, compare=False)
    made_in: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    inner: tuple[Any, Skip] | None = None


def start_trail(**attributes: Any) -> Trail:
    """Return the trail of a new state of the residual stream: it contains itself in its place, and
    comes from itself."""
    mark = Mark(True, attributes.pop("before", frozenset()))
    return Trail(frozenset((mark,)), frozenset((mark,)), **attributes)


def join_trails(trails: Iterable[Trail | None]) -> Trail | None:
    """Return the trail of a value on the paths of several values; None where no paths pass.

    A trail records which states a value contains unchanged in their place, and which it was
    computed from. It finds branches that contain their own skip connection.
    """
    present = [t for t in trails if t is not None]
    if not present:
        return None
    sources = present[0].sources.union(*(t.sources for t in present[1:]))
    inner = present[0].inner if all(t.inner for t in present) else None
    return Trail(sources=sources, inner=inner, made_in=max((t.made_in for t in present), key=len))


def bend_trail(trail: Trail | None) -> Trail | None:
    """Return the trail of f(h), a function of each entry; None where no paths pass.

    A trail records which states the value contains in their place: after f they are there only
    "bent".
    """
    if trail is None:
        return None
    bent = frozenset(map(_bend, trail.in_place))
    return dataclasses.replace(trail, in_place=bent, sources=trail.sources | bent)


def _bend(mark):
    """Return a mark as that of a function of each entry; it stays if it is one already."""
    return mark if isinstance(mark, tuple) else ("bent", mark)


def carry_trail(before: Trail | None, after: Trail | None, branch: Any) -> Trail | None:
    """Return the trail of a loop's state: which states it contains in their place, and which it
    comes from.

    Outside of branches it counts as a new state of the stream.

    Args:
        before, after: The trails before and after a step.
        branch: The branch around the loop; None for none.
    """
    if before is None or after is None:
        first = before or after
        return start_trail(inner=first.inner) if first and branch is None else first
    inner = before.inner if after.inner else None
    if branch is None:
        return dataclasses.replace(before, inner=inner)
    in_place, sources = before.in_place & after.in_place, before.sources | after.sources
    skip = after.skip or before.skip
    return Trail(in_place, sources, skip, after.made_in, inner)


def choose_trail(first: Trail | None, second: Trail | None, branch: Any) -> Trail | None:
    """Return the trail of a result of a condition: what it contains in place in both of two cases.

    Args:
        first, second: The trails of the cases.
        branch: The branch around the condition; None for none.
    """
    if first is None or second is None:
        return first or second
    in_place, sources = first.in_place & second.in_place, first.sources | second.sources
    if branch is None and not in_place:
        in_place = frozenset((Mark(),))
    skip, inner = first.skip or second.skip, first.inner or second.inner
    return Trail(in_place, sources | in_place, skip, second.made_in, inner)


def leave_branch(trail: Trail | None, entry: Any) -> Trail | None:
    """Return the trail of a value after it left a branch: that of a new state of the stream.

    If the value is a sum with a skip of this branch, the branch is noted as one that contains its
    skip (`Trail.inner`).

    Args:
        trail: The trail inside of the branch; None where no paths pass.
        entry: The branch, an `Entry`.

    Returns:
        The new trail; None where no paths pass.
    """
    if trail is None:
        return None
    inner = trail.inner
    # A name marks a value, not a scope: its sum stands outside of all branches.
    skip_branch = None if entry.is_name else entry
    contains_skip = trail.skip is not None and trail.skip.branch == skip_branch
    if contains_skip:
        inner = (entry, trail.skip)
    return start_trail(before=trail.sources, made_in=entry.path, inner=inner)


def follow(
    eqn: JaxprEqn,
    parts: Sequence[Trail | None],
    joined: Trail,
    scopes: Sequence[Scope],
    branch: Any,
    place: str,
) -> Trail:
    """Return the trail of a result of an equation.

    Args:
        eqn: The equation, without a program inside.
        parts: Trails of its arguments; None for those that pass no paths.
        joined: See `join_trails`, for the paths that pass.
        scopes: The scopes of the equation.
        branch: The branch that it is inside of.
        place: Its position in the caller's code.
    """
    name, names = eqn.primitive.name, tuple(scope.name for scope in scopes)
    present = [p for p in parts if p is not None]
    if name in _JOINING and len(present) > 1:
        return _add(present, joined, names, branch, place)
    if len(present) == 1:
        (part,) = present
        if name == "name":
            return dataclasses.replace(part, made_in=(*names, eqn.params["name"]))
        if name in _BENDING:
            return bend_trail(part)
        if name in _KEEPING or name in _JOINING:
            return part
        if name == "reduce_sum":
            kept = frozenset(m for m in part.in_place if isinstance(m, Mark))
            return dataclasses.replace(part, in_place=kept)
    if _only_scales(eqn):
        placed = present if len(present) == 1 else [p for p in present if p.in_place]
        if len(placed) == 1:
            return dataclasses.replace(placed[0], sources=joined.sources, inner=joined.inner)
        in_place = frozenset().union(*(p.in_place for p in placed))
        if placed:
            return bend_trail(dataclasses.replace(joined, in_place=in_place))
        names = joined.made_in
    return _make_new(joined, names, branch)


def _make_new(joined, names, branch):
    """Return the trail of a value, such as a matrix product, in which no earlier state is in its
    place.

    Outside of branches the value is a new state, which is in place in itself.

    Args:
        joined: What the arguments went through, see `join_trails`.
        names: Names of the scopes of the equation.
        branch: The branch that it is inside of; None for none.
    """
    if branch is not None:
        return dataclasses.replace(joined, made_in=names)
    in_place = frozenset((Mark(),))
    return Trail(in_place, joined.sources | in_place, None, names, joined.inner)


def _add(parts, joined, names, branch, place):
    """Return the trail of a sum, or of another value that has entries of several.

    The sum is a residual sum, state + f(state), if one summand contains a state in its place and
    another was computed from it. Inside a branch this means that the branch contains its own skip.

    Args:
        parts: Trails of the summands that pass paths: what each contains and comes from.
        joined: See `join_trails`.
        names: Names of the scopes of the equation.
        branch, place: See `follow`.
    """
    in_place = frozenset().union(*(p.in_place for p in parts))
    residuals = [(m, p) for p in parts for m in in_place if _is_residual(m, p, branch)]
    skip = next((p.skip for p in parts if p.skip and p.skip.branch == branch), None)
    if skip is None and any(branch is not None or _is_stream(mark) for mark, _ in residuals):
        added_in = residuals[0][1].made_in
        scopes = itertools.zip_longest(added_in, names)
        skip = Skip(branch, place, next((inner for inner, outer in scopes if inner != outer), None))
    if branch is not None or all(p.in_place == in_place for p in parts):
        return dataclasses.replace(joined, in_place=in_place, skip=skip)
    if residuals:
        return start_trail(skip=skip, made_in=names, inner=joined.inner)
    return _make_new(joined, names, branch)


def _is_stream(mark):
    """Return whether a mark belongs to a state of the residual stream."""
    return (mark if isinstance(mark, Mark) else mark[1]).is_stream


def _is_residual(mark, part, branch):
    """Return whether a summand was computed from a state that another summand contains in its
    place.

    Args:
        mark: The mark of the state.
        part: Trail of the summand: the states that it contains in place, and those it comes from.
        branch: The branch that the sum is inside of; None for none.
    """
    if mark in part.in_place or _bend(mark) in part.in_place:
        return False
    is_behind = branch is None and any(mark in getattr(m, "before", ()) for m in part.sources)
    return mark in part.sources or is_behind


def _only_scales(eqn):
    """Return whether an equation multiplies or divides each entry, so that states stay in their
    place."""
    if eqn.primitive.name == "dot_general":
        return not eqn.params["dimension_numbers"][0][0]
    return eqn.primitive.name in ("mul", "div")


def check_skips(trail: Trail | None, kinds: Sequence[str]) -> None:
    """Check that the paths of the output do not all go through branches that contain their skip.

    Args:
        trail: What the paths of the output went through; None where no paths pass.
        kinds: The kinds of branches.

    Raises:
        ValueError: They do; the message names a branch, the line of the sum, and a scope inside.
    """
    if trail is None or trail.inner is None:
        return
    entry, skip = trail.inner
    label = "branches" if len(kinds) == 1 else f"branches[{kinds[entry.axis]!r}]"
    branch = f"the {'name' if entry.is_name else 'scope'} {'/'.join(entry.path)!r}"
    such = f", such as {skip.inside!r}" if skip.inside else ""
    raise ValueError(
        f"{label}: {branch} contains its own skip at {skip.place}, so every path would go through "
        f"it; match only what is added to the skip{such}"
    )
