"""Which cases of a table belong to the quick suite."""

from collections.abc import Iterable

import pytest


def full_but(cases: Iterable[str], *quick: str) -> list:
    """Returns the cases as parameters: `quick` always run, the others in the full suite."""
    cases = list(cases)
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.full) for case in cases]


def full_if(cases: Iterable[str], *full: str) -> list:
    """Returns the cases as parameters: those of `full` run only in the full suite."""
    cases = list(cases)
    return full_but(cases, *(case for case in cases if case not in full))
