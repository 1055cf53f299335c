"""Checks that a call ends in an error of one line that names what is wrong."""

from functools import partial

import pytest

from tests.support.kept_messages import check_error


def each_is_refused(*cases, error=ValueError):
    """Checks for each (call, pattern) that the call raises the error with that message.

    The whole message is compared with the one that tests/golden/texts/messages has.
    """
    for call, message in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        check_error(caught)


def is_refused(message, call, *arguments, error=ValueError, **options):
    """Checks that call(*arguments, **options) raises the error with this message."""
    each_is_refused((partial(call, *arguments, **options), message), error=error)


def parametrize_refusals(cases):
    """Parametrises a test by (arguments, message), for every case (*arguments, message).

    The message, which names what is refused, is the id of the case.
    """
    arguments = [(case[:-1], case[-1]) for case in cases]
    return pytest.mark.parametrize(
        ("arguments", "message"), arguments, ids=[message for _, message in arguments]
    )
