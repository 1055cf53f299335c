"""Which cases of a table belong to the quick suite."""

from collections.abc import Iterable

import pytest


def full_but(cases: Iterable[str], *kept: str) -> list:
    """The cases as parameters, all but `kept` of the full suite alone."""
    cases = list(cases)
    assert set(kept) <= set(cases), set(kept) - set(cases)
    return [c if c in kept else pytest.param(c, marks=pytest.mark.full) for c in cases]


def full_if(cases: Iterable[str], *full: str) -> list:
    """The cases as parameters, those of `full` of the full suite alone."""
    cases = list(cases)
    return full_but(cases, *(c for c in cases if c not in full))
