"""Which parts of a program are branches: scopes and names that match a pattern."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, Var, jaxprs_in_params

from rank_collapse.paths.traced.programs import Scope, read_scopes

KINDS = ("attention", "mlp")


class Entry(NamedTuple):
    """One entry into a scope that is a branch.

    Attributes:
        axis: Axis of the sums: which kind of branch.
        path: The names of the scopes up to it.
        number: Tells entries into scopes of one name apart; None for a value that has the name of
            a branch.
    """

    axis: int
    path: tuple[str, ...]
    number: int | None

    @property
    def is_name(self) -> bool:
        """Whether it is a name and no scope."""
        return self.number is None


class Branches:
    """The patterns of the branches, and the matches found in a program.

    Args:
        patterns: A regular expression, or one for each of "attention" and "mlp". It is compared
            with every whole part of a scope's path, and with runs of parts joined by "/".

    Raises:
        ValueError: No patterns of that form.
    """

    def __init__(self, patterns: str | Mapping[str, str]):
        if isinstance(patterns, Mapping):
            if not patterns or not set(patterns) <= set(KINDS) or "attention" not in patterns:
                raise ValueError(
                    f"branches={patterns!r} must have the key 'attention', and may have the key "
                    "'mlp', but no other"
                )
            patterns = {kind: patterns[kind] for kind in KINDS if kind in patterns}
        else:
            patterns = {"attention": patterns}
        self.kinds = tuple(patterns)
        self.patterns = [_compile(p) for p in patterns.values()]
        self.names: set[str] = set()  # all scopes and names of the program
        self.places: list[set[str]] = [set() for _ in patterns]  # those that match
        self.num_shifts = [0] * len(self.patterns)

    def find_entry(self, scopes: Sequence[Scope]) -> Entry | None:
        """Return the outermost scope that is a branch; None where there is none.

        Args:
            scopes: Names of the scopes, from the outermost to the innermost.

        Raises:
            ValueError: A branch of one kind inside a branch of the other.
        """
        path = tuple(scope.name for scope in scopes)
        self.names.update(path)
        entries = []
        for axis, pattern in enumerate(self.patterns):
            for end in range(1, len(path) + 1):
                if _matches(pattern, path[:end]):
                    entries.append(Entry(axis, path[:end], scopes[end - 1].number))
                    break
        if len(entries) > 1:
            raise ValueError(
                f"branches: the scope {'/'.join(path)!r} matches the patterns of both "
                f"{self.kinds[0]!r} and {self.kinds[1]!r}, but may match only one"
            )
        for entry in entries:
            self.places[entry.axis].add("/".join(entry.path))
        return entries[0] if entries else None

    def find_name(self, name: str) -> int | None:
        """Return the axis of a `checkpoint_name` that is a branch; None where it is none.

        Args:
            name: The name.

        Raises:
            ValueError: Patterns of both kinds match it.
        """
        self.names.add(name)
        axes = [axis for axis, p in enumerate(self.patterns) if p.fullmatch(name)]
        if len(axes) > 1:
            raise ValueError(
                f"branches: the name {name!r} matches the patterns of both {self.kinds[0]!r} and "
                f"{self.kinds[1]!r}, but may match only one"
            )
        for axis in axes:
            self.places[axis].add(name)
        return axes[0] if axes else None

    def check_carry(
        self, jaxpr: Jaxpr, scopes: tuple[Scope, ...], carry: Sequence[tuple[Var, Var]]
    ) -> None:
        """Check that not several values go from a branch in one step of a loop to the next step.

        Args:
            jaxpr: One step of the loop.
            scopes: Scopes around the loop, none of which is a branch.
            carry: (argument, result) of the step for each value of the carry that passes paths.

        Raises:
            ValueError: Several values do: one branch would count in several steps.
        """
        made_in, read_in = {}, set()
        for eqn in jaxpr.eqns:
            entry = self.find_entry(scopes + read_scopes(eqn))
            if entry is not None:
                made_in |= dict.fromkeys(eqn.outvars, entry)
                read_in |= {(v, entry.path) for v in eqn.invars if isinstance(v, Var)}
        entries = [
            made_in[result]
            for argument, result in carry
            if result in made_in and (argument, made_in[result].path) in read_in
        ]
        for entry in entries:
            if entries.count(entry) > 1:
                raise ValueError(
                    f"branches: a loop in fn passes several values from the scope "
                    f"{'/'.join(entry.path)!r} in one step to the same scope in the next step, so "
                    "that one branch would count in each step; name the output of the branch with "
                    "jax.ad_checkpoint.checkpoint_name"
                )

    def check_matched(self, jaxpr: Jaxpr) -> None:
        """Check that every pattern matches.

        Args:
            jaxpr: The whole program.

        Raises:
            ValueError: One matches no scope and no name; the message lists the nearest. Or one
                matches only in a program inside that was not read, such as a loop of no steps.
        """
        unmatched = [p for p, places in zip(self.patterns, self.places, strict=True) if not places]
        if not unmatched:
            return
        self._read_all(jaxpr, ())  # refuses an attention inside an MLP there, too
        for pattern, places in zip(self.patterns, self.places, strict=True):
            text = pattern.pattern
            if not places:
                raise ValueError(f"branches={text!r} matches no scope or name{self._suggest(text)}")
            if pattern in unmatched:
                raise ValueError(
                    f"branches={text!r} matches {_list(places)} only inside an operation that is "
                    "not opened (such as shard_map), or that fn does not run for this x (such as "
                    "a loop of no steps)"
                )

    def _read_all(self, jaxpr, scopes):
        """Find the scopes and names of a program and of all programs inside it."""
        for eqn in jaxpr.eqns:
            inner_scopes = scopes + read_scopes(eqn)
            self.find_entry(inner_scopes)
            if eqn.primitive.name == "name":
                self.find_name(eqn.params["name"])
            for inner in jaxprs_in_params(eqn.params):
                self._read_all(inner, inner_scopes)

    def check_counted(self) -> None:
        """Check that states left branches of every kind.

        Raises:
            ValueError: No state left the matching branches.
        """
        for kind, pattern, places, count in zip(
            self.kinds, self.patterns, self.places, self.num_shifts, strict=True
        ):
            if not count:
                raise ValueError(
                    f"branches={pattern.pattern!r} matches {_list(places)}, but no path passes "
                    f"through it; match the scope that computes the output of the {kind} branch, "
                    "or the name of that output"
                )

    def _suggest(self, text):
        """Return the end of the message: the names that are nearest to a pattern, or how to give
        names."""
        names = sorted(self.names)
        if not names:
            return (
                ", because fn has none; put the branch into `with jax.named_scope('attention'):`, "
                "or name its output with jax.ad_checkpoint.checkpoint_name(output, 'attention')"
            )
        lower = {name.lower(): name for name in names}
        close = difflib.get_close_matches(text.lower(), lower, 5, cutoff=0.4)
        listed = [lower[name] for name in close] or names[:12]
        beginning = "the nearest are" if close else "fn has"
        return f"; {beginning} {', '.join(map(repr, listed))}"


def _compile(pattern: object) -> re.Pattern:
    """Compile a pattern of `branches`; a wrong one raises a ValueError."""
    if not isinstance(pattern, str | re.Pattern) or not pattern:
        raise ValueError(f"branches={pattern!r} is not a regular expression")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"branches={pattern!r} is not a regular expression: {error}") from None


def _matches(pattern, path):
    """Whether a pattern matches the end of a path: its last part, or several."""
    return any(pattern.fullmatch("/".join(path[start:])) for start in range(len(path)))


def _list(places):
    places = sorted(places)
    return ", ".join(map(repr, places[:5])) + (", …" if len(places) > 5 else "")
