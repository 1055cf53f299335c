"""Checks that a call ends in an error of one line that names what is wrong."""

from functools import partial

import pytest


def each_is_refused(*cases, error=ValueError):
    """Checks for each (call, pattern) that the call raises the error with that message."""
    for call, message in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def is_refused(message, call, *arguments, error=ValueError, **options):
    """Checks that call(*arguments, **options) raises the error with this message."""
    each_is_refused((partial(call, *arguments, **options), message), error=error)


def refused(cases, by=lambda call: call(), error=ValueError):
    """Returns the test that by(*arguments) is refused, for every case (*arguments, pattern)."""

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[-1])
    def test(case):
        each_is_refused((lambda: by(*case[:-1]), case[-1]), error=error)

    return test
