"""Which cases of a table belong to the usual run of the tests."""

from collections.abc import Iterable

import pytest


def slow_but(cases: Iterable[str], *kept: str) -> list:
    """The cases as parameters, all but `kept` marked slow."""
    cases = list(cases)
    assert set(kept) <= set(cases), set(kept) - set(cases)
    return [c if c in kept else pytest.param(c, marks=pytest.mark.slow) for c in cases]


def slow_if(cases: Iterable[str], *slow: str) -> list:
    """The cases as parameters, those of `slow` marked."""
    cases = list(cases)
    return slow_but(cases, *(c for c in cases if c not in slow))
