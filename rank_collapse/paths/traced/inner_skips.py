"""Branches that contain their own skip connection, found in a traced program.

Such a branch, a whole layer or an attention module that adds the residual itself, would be on every
path. The program is followed without numbers: what enters and leaves each branch, what each value
contains of earlier ones (`identity_rules`), and which values all paths go through (`dominators`).
A branch that some paths go past may contain its input, as in x + (pool(x) − x).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core as jax_core, source_info_util
from jax.extend.core import Jaxpr

from rank_collapse.paths.traced import primitives
from rank_collapse.paths.traced.branches import Branches, Entry
from rank_collapse.paths.traced.dominators import Node, meet, walk_up
from rank_collapse.paths.traced.identity_rules import (
    Content,
    Place,
    Residual,
    Share,
    follow,
    join_residuals,
    make_content,
)
from rank_collapse.paths.traced.programs import Scope, open_program, read_scopes
from rank_collapse.paths.traced.values import is_inexact

_MOST_ROUNDS = 4  # through a loop, until its carry contains what it contains after all steps


class _Branch(Node):
    """One entry into the scope of a branch, as a node that all its values lie behind.

    Attributes:
        entry: The scope.
    """

    __slots__ = ("entry",)

    def __init__(self, above: Node, entry: Entry):
        super().__init__(above)
        self.entry = entry


class _Suspect(NamedTuple):
    """A residual sum that leaves a branch.

    Attributes:
        owner: The branch, or the value that has a branch's name.
        residual: The sum.
        axis: The kind of branch.
        label: The scope or the name, as the message says it.
        path: The names of the scopes of the branch.
    """

    owner: Node
    residual: Residual
    axis: int
    label: str
    path: tuple[str, ...]


def check_inner_skips(program: Any, branches: Branches, start: Any = None) -> None:
    """Check that no branch that all paths go through adds its input to its output.

    Args:
        program: A traced program of one argument, with constants.
        branches: Patterns of the branches.
        start: Where paths start inside the program, an `interpreter.Start`; None for the argument.

    Raises:
        ValueError: A branch contains its skip; the message names the scope, the line of the sum,
            and a scope inside that does not contain it.
    """
    root = Node(None)
    finder = _Finder(branches, start, root)
    x = _make_start(root) if start is None else Content()
    (out,) = finder.run(program.jaxpr, [x])
    passed = set() if out.node is None else set(walk_up(out.node))
    for suspect in finder.suspects:
        is_scope = isinstance(suspect.owner, _Branch)
        if suspect.owner in passed and (is_scope or suspect.residual.stream in passed):
            _refuse(suspect, branches)


def _refuse(suspect, branches):
    """Refuse a branch that contains its skip.

    Raises:
        ValueError: Always.
    """
    axis, residual = suspect.axis, suspect.residual
    argument = "branches" if len(branches.kinds) == 1 else f"branches[{branches.kinds[axis]!r}]"
    # Equations inside a function of JAX, such as `jnp.where`, have no line of the user's.
    lines = [
        source_info_util.summarize(e.source_info) for e in (residual.eqn, *residual.calls[::-1])
    ]
    place = f"{'/'.join(residual.scopes) or 'the top level'} ({next(filter(None, lines), '')})"
    inside, same = residual.added_in, 0
    while same < min(len(inside), len(residual.scopes)) and inside[same] == residual.scopes[same]:
        same += 1
    if len(inside) > same and same >= len(suspect.path):
        cure = f"give the scope or name of what is added, such as {inside[same]!r}"
    elif suspect.path:
        cure = "put a scope inside it around what is added alone"
    else:
        cure = "name what is added, before the sum"
    raise ValueError(
        f"{argument}: {suspect.label} contains its own skip, so that every path would go through "
        f"it: it adds its input at {place}; {cure}"
    )


class _Finder:
    """Follows a program and keeps the residual sums that leave branches."""

    def __init__(self, branches, start, root):
        self.branches, self.start, self.root = branches, start, root
        self.suspects: list[_Suspect] = []
        self.calls: list[Any] = []  # around the equation

    def run(
        self,
        jaxpr: Jaxpr,
        arguments: Sequence[Content],
        scopes: tuple[Scope, ...] = (),
        branch: _Branch | None = None,
    ) -> list[Content]:
        """Follow a program.

        Args:
            jaxpr: The program.
            arguments: Contents of its inputs.
            scopes: Around the program.
            branch: The branch that the whole program is inside of; None for none.
        """
        frame = _Frame(self, branch)
        frame.contents |= zip(jaxpr.invars, arguments, strict=True)
        for eqn in jaxpr.eqns:
            inner_scopes = scopes + read_scopes(eqn)
            inside = branch or frame.find_branch(self.branches.find_entry(inner_scopes))
            if eqn.primitive.name == "name":
                inside, outs = self._name(eqn, frame, inside, inner_scopes)
            else:
                values = [frame.read(v, inside) for v in eqn.invars]
                outs = self._follow(eqn, values, inner_scopes, inside)
            frame.contents |= zip(eqn.outvars, outs, strict=True)
            if inside is not branch:
                frame.made_in |= dict.fromkeys(eqn.outvars, inside)
        return [frame.read(v, branch) for v in jaxpr.outvars]

    def _name(self, eqn, frame, inside, scopes):
        """Follow a `checkpoint_name`: a branch, a state where paths start, or a copy."""
        name, variable = eqn.params["name"], eqn.invars[0]
        axis = self.branches.find_name(name)
        if axis is not None and inside is None:
            left = frame.made_in.get(variable) if isinstance(variable, jax_core.Var) else None
            if left is not None and left.entry.axis == axis:
                return left, [frame.read(variable, left)]
            value = frame.read(variable, None)
            if value.node is None:
                return None, [value]
            place = Place(eqn, _names(scopes), None)
            out = make_content(place, [value])
            self.suspects += [
                _Suspect(out.node, r, axis, f"the value named {name!r}", ())
                for r in value.residuals
            ]
            return None, [out]
        value = frame.read(variable, inside)
        starts = self.start is not None and self.start.pattern.fullmatch(name)
        if starts and value.node is None and is_inexact(variable.aval):
            value = _make_start(Node(self.root, inside), scopes)
        elif value.node is not None:
            value = value._replace(made_in=(*_names(scopes), name))
        return inside, [value]

    def _follow(self, eqn, values, scopes, branch):
        """Follow one equation."""
        name = eqn.primitive.name
        if name in primitives.CALLS:
            jaxpr, _ = open_program(eqn.params[primitives.CALLS[name]])
            self.calls.append(eqn)
            outs = self.run(jaxpr, values, scopes, branch)
            self.calls.pop()
            return outs
        if name == "scan":
            return self._scan(eqn, values, scopes, branch)
        if name == "cond":
            cases = [
                self.run(open_program(p)[0], values[1:], scopes, branch)
                for p in eqn.params["branches"]
            ]
            place = Place(eqn, _names(scopes), branch)
            return [_choose(place, outs) for outs in zip(*cases, strict=True)]
        return follow(Place(eqn, _names(scopes), branch, tuple(self.calls)), values)

    def _scan(self, eqn, values, scopes, branch):
        """Follow a loop until its carry contains the same after one more step."""
        num_fixed, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        jaxpr, _ = open_program(eqn.params["jaxpr"])
        fixed, carry = values[:num_fixed], values[num_fixed : num_fixed + num_carry]
        slices, place = values[num_fixed + num_carry :], Place(eqn, _names(scopes), branch)
        outside = Node(self.root)  # numbers all values of the loop behind it
        for _ in range(_MOST_ROUNDS):
            num_suspects = len(self.suspects)
            outs = self.run(jaxpr, [*fixed, *carry, *slices], scopes, branch)
            joined = [_choose(place, pair) for pair in zip(carry, outs[:num_carry], strict=True)]
            if all(_are_alike(*pair, outside) for pair in zip(carry, joined, strict=True)):
                break
            carry = joined
            del self.suspects[num_suspects:]
        else:
            outs = self.run(jaxpr, [*fixed, *carry, *slices], scopes, branch)
        return outs


def _make_start(node, scopes=()):
    """Return the content of the value that paths start from."""
    return Content(node, {node: Share.IN_PLACE}, made_in=_names(scopes))


def _choose(place, cases):
    """Return the content of a value that is one of several: what all of them contain."""
    parts = [c for c in cases if c.node]
    if len({p.node for p in parts}) <= 1:
        return parts[0] if parts else cases[0]
    common = set.intersection(*(set(p.shares) for p in parts))
    shares = {n: max(p.shares[n] for p in parts) for n in common}
    out = make_content(
        place,
        parts,
        shares,
        residuals=join_residuals(parts),
        is_bent=all(p.is_bent for p in parts),
        made_in=parts[-1].made_in,
    )
    out.node.options = tuple(p.node for p in parts)
    return out


def _are_alike(first, second, outside):
    """Whether a carry contains the same as after one more step, but for the loop's own values."""
    keys = []
    for content in (first, second):
        shares = {(n, s) for n, s in content.shares.items() if n.number < outside.number}
        keys.append((content.node is None, shares, {id(r.eqn) for r in content.residuals}))
    return keys[0] == keys[1]


def _names(scopes):
    return tuple(scope.name for scope in scopes)


class _Frame:
    """The contents of one run of a program, and which branch each value was made in."""

    def __init__(self, finder, branch):
        self.finder, self.branch = finder, branch
        self.contents: dict[Any, Content] = {}
        self.made_in: dict[Any, _Branch] = {}
        self.branches: dict[Entry, _Branch] = {}
        self.outside: dict[Any, Content] = {}
        self.entered: dict[Any, Content] = {}

    def find_branch(self, entry):
        """Return the branch of an entry in this run; None for no entry."""
        if entry is None:
            return None
        return self.branches.setdefault(entry, _Branch(None, entry))

    def read(self, variable, inside):
        """Return a variable as it is inside a branch, or outside of all."""
        if isinstance(variable, jax_core.Literal):
            return Content()
        made_in = self.made_in.get(variable, self.branch)
        value = self.contents.get(variable, Content())
        if made_in is inside or value.node is None:
            return value
        if made_in is not None:
            value = self._leave(variable, value, made_in)
        return value if inside is None else self._enter(variable, value, inside)

    def _leave(self, variable, value, branch):
        """Return a value as it is outside of the branch in which it was made."""
        if variable not in self.outside:
            path = branch.entry.path
            self.finder.suspects += [
                _Suspect(branch, r, branch.entry.axis, f"the scope {'/'.join(path)!r}", path)
                for r in value.residuals
                if r.branch is branch
            ]
            node = Node(value.node)
            self.outside[variable] = Content(node, {node: Share.IN_PLACE}, made_in=path)
        return self.outside[variable]

    def _enter(self, variable, value, branch):
        """Return a value as it is inside a branch: a part of the branch's input."""
        if (variable, branch) not in self.entered:
            if branch.above is None:
                branch.above = value.node
                branch.renumber()
            branch.above = meet([branch.above, value.node])
            node = Node(branch, branch)
            shares = value.shares | {node: Share.IN_PLACE}
            self.entered[variable, branch] = value._replace(node=node, shares=shares, residuals=())
        return self.entered[variable, branch]
