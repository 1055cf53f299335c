"""Which token a token may attend to, where keys are others than the tokens of the queries."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch.torch_tokens import Tokens, find_allowed_tokens  # noqa: E402

ALLOWED = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]], dtype=torch.bool)


def make_tokens(index, keys, is_cross=False):
    index, keys = torch.tensor([index]), None if keys is None else torch.tensor([keys])
    return Tokens(torch.zeros(8, 2), index, keys, torch.zeros(1), is_cross, ())


def test_keys_in_another_order_are_those_of_their_tokens():
    tokens = make_tokens([4, 5, 6], [6, 4, 5])
    found = find_allowed_tokens(tokens, ALLOWED)
    assert torch.equal(found, ALLOWED[..., [1, 2, 0]])


def test_of_keys_that_lack_the_token_of_a_query_nothing_is_known():
    """k = tokens[1:]: token 4 is no key, and not the first one."""
    assert find_allowed_tokens(make_tokens([4, 5, 6], [5, 6]), ALLOWED[..., :2]) is None


def test_keys_of_other_tokens_and_unknown_ones_are_unknown():
    assert find_allowed_tokens(make_tokens([4, 5, 6], None), ALLOWED) is None
    assert find_allowed_tokens(make_tokens([4, 5, 6], [1, 2, 3], is_cross=True), ALLOWED) is None


def test_own_keys_are_as_they_are():
    assert find_allowed_tokens(make_tokens([4, 5, 6], [4, 5, 6]), ALLOWED) is ALLOWED
