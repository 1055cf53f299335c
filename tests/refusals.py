"""Calls that end in an error, each with one line that names what is wrong."""

from functools import partial

import pytest


def each_is_refused(*cases, error=ValueError):
    """Every (call, what the error's message has in it)."""
    for call, message in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def is_refused(message, call, *arguments, error=ValueError, **options):
    """call(*arguments, **options)."""
    each_is_refused((partial(call, *arguments, **options), message), error=error)


def refused(cases, by=lambda call: call(), error=ValueError):
    """The test that by(*case) ends in such an error, for every (*case, what its message has)."""

    @pytest.mark.parametrize("case", cases, ids=lambda case: case[-1])
    def test(case):
        each_is_refused((lambda: by(*case[:-1]), case[-1]), error=error)

    return test
