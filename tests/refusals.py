"""Calls that end in an error, each with one line that names what is wrong."""

import pytest


def each_is_refused(*cases, error=ValueError):
    """Every (call, what the error's message has in it)."""
    for call, message in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
