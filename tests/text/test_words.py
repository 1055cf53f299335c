"""Words and their ids; the shipped text."""

import pytest
from refusals import each_is_refused

from rank_collapse.text import words


def test_words_and_punctuation_in_order():
    assert words.tokenize('The cat\'s "hat", é_1!') == [
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
    ids, vocabulary = words.token_ids("a b, a c", 10)
    assert ids.tolist() == [0, 1, 2, 0, 3] and vocabulary == ["a", "b", ",", "c"]
    assert words.token_ids("a b, a c", 3)[0].tolist() == [0, 1, 2]


def test_the_shipped_text_is_long_enough():
    ids, vocabulary = words.token_ids(words.default_text(), 1000)
    assert len(ids) >= 256 and 100 < len(vocabulary) < len(ids)


@pytest.mark.parametrize("content", ["", "word", "  \n"])
def test_fewer_than_two_tokens_are_refused(content):
    each_is_refused(
        (lambda: words.token_ids(content, 10), "fewer than 2"),
        (lambda: words.token_ids("many words here", 1), "fewer than 2"),
    )


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "good").write_text("Some text.\n")
    assert words.read_text(tmp_path / "good") == "Some text.\n"
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ValueError, match="empty is empty"):
        words.read_text(tmp_path / "empty")


def test_windows():
    assert words.windows("a b c d e", 3, 3) == ["a b c", "b c d", "c d e"]
    assert words.windows("a b", 4, 5) == ["a b"]
