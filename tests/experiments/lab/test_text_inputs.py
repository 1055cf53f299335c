"""The text that experiments read as tokens."""

import numpy as np
import pytest

from experiments.lab.text_inputs import encode_texts, join_texts, read_text, token_ids, tokenize
from tests.support.refusals import each_is_refused, is_refused


def test_words_and_punctuation_in_order():
    assert tokenize('The cat\'s "hat", é_1!') == [
        "the",
        "cat",
        "'",
        "s",
        '"',
        "hat",
        '"',
        ",",
        "é_1",
        "!",
    ]


def test_ids_are_ranks_of_first_appearance_and_a_longer_excerpt_begins_alike():
    ids, vocabulary = token_ids("a b, a c", 10)
    assert ids.tolist() == [0, 1, 2, 0, 3] and vocabulary == ["a", "b", ",", "c"]
    assert token_ids("a b, a c", 3)[0].tolist() == [0, 1, 2]
    assert token_ids("a b, a c", 2)[0].tolist() == [0, 1]


@pytest.mark.parametrize("content", ["", "word", "  \n"])
def test_fewer_than_two_tokens_are_refused(content):
    each_is_refused(
        (lambda: token_ids(content, 10), "fewer than the 2 that"),
        (lambda: token_ids("many words here", 1), "fewer than the 2 that"),
    )
    with pytest.raises(ValueError, match=r"^the text has 0 tokens, fewer than the 2 that"):
        token_ids("many words here", -1)


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "good").write_text("Some text.\n")
    assert read_text(tmp_path / "good") == "Some text.\n"
    (tmp_path / "empty").write_text(" \n")
    is_refused("empty is empty", read_text, tmp_path / "empty")


TEXTS = ["The cat sat on the mat.", "A dog ran after the cat, and the cat ran too.", "Birds sing."]


def word_lengths(text):
    """An encoder: the length of each word, between 1 and 2."""
    return [1, *map(len, text.split()), 2]


def test_encode_cuts_and_refuses():
    batch = encode_texts(TEXTS, word_lengths, max_tokens=5)
    np.testing.assert_array_equal(batch.ids[1], [1, 1, 3, 3, 2])
    np.testing.assert_array_equal(batch.mask[2], [True] * 4 + [False])
    each_is_refused(
        (lambda: encode_texts(["a", " "], word_lengths, max_tokens=5), "text 1 is empty"),
        (
            lambda: encode_texts(TEXTS, word_lengths, max_tokens=9, num_positions=8),
            "max_tokens=9 is more than the 8 positions",
        ),
    )
    with pytest.raises(ValueError, match="3"):
        encode_texts(TEXTS, word_lengths, max_tokens=5, vocab_size=3)
    assert (
        encode_texts(TEXTS, word_lengths, max_tokens=5, vocab_size=6).ids.dtype == batch.ids.dtype
    )


def test_join():
    assert join_texts(["a b", "c d e", "f", "g h i j"], word_lengths, 6, 9) == [
        "a b c d e",
        "f g h i j",
    ]
    # Two special tokens are in each text, and once in the joined one.
    words = ["a", "b", "c", "d", "e", "f"]
    assert join_texts(words, word_lengths, 5, 9) == ["a b c", "d e f"]
    assert join_texts(words, word_lengths, 3, 2) == ["a", "b"]
    is_refused("fewer than 99 tokens", join_texts, TEXTS, word_lengths, 99, 9)


def test_a_limit_may_be_reached():
    batch = encode_texts(["a b", "c"], word_lengths, max_tokens=4, num_positions=4)
    assert batch.ids.shape == (2, 4)
    assert encode_texts(["a b"], word_lengths, max_tokens=1).ids.tolist() == [[2]]
