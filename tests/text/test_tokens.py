"""Batches of token ids: texts read, cut and padded."""

import numpy as np
import pytest
from refusals import each_is_refused

from rank_collapse.text import tokens

TEXTS = ["The cat sat on the mat.", "A dog ran after the cat, and the cat ran too.", "Birds sing."]


def word_lengths(text):
    """An encoder: the length of each word, between 1 and 2."""
    return [1, *map(len, text.split()), 2]


def test_read_texts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One text\nover two lines.\n\nAnother.\n\n\n")
    assert tokens.read_texts(path) == ["One text over two lines.", "Another."]
    path.write_text("One.\nTwo.\n")
    assert tokens.read_texts(path, limit=1) == ["One."]
    path.write_text("  \n\n ")
    with pytest.raises(ValueError, match=r"a\.txt holds no text"):
        tokens.read_texts(path)


def test_read_table(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text('index\tsentence1\tsentence2\tlabel\n0\tA "b\tC.\tentailment\n1\tD\tE\tnot\n')
    assert tokens.read_texts(path) == ['A "b C.', "D E"]
    assert tokens.read_texts(path, ["sentence2"]) == ["C.", "E"]
    with pytest.raises(ValueError, match="no column 'title'"):
        tokens.read_texts(path, ["title"])
    path.write_text("index\tlabel\n0\t1\n")
    with pytest.raises(ValueError, match="no column of text; its columns are"):
        tokens.read_texts(path)


def test_rte(shared_data):
    texts = tokens.read_texts(shared_data / "RTE" / "dev.tsv")
    assert len(texts) == 277 and texts[0].endswith("Christopher Reeve had an accident.")


def test_pad_and_ids(tmp_path):
    batch = tokens.pad([[3, 4, 5], [6]], vocab_size=7)
    np.testing.assert_array_equal(batch.ids, [[3, 4, 5], [6, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[True, True, True], [True, False, False]])
    np.testing.assert_array_equal(batch.lengths, [3, 1])
    for bad, message in (([[7]], "id 7 of text 0"), ([[1], [-2, 3]], "id -2 of text 1")):
        with pytest.raises(ValueError, match=message):
            tokens.pad(bad, vocab_size=7)
    each_is_refused(
        (lambda: tokens.pad([[1], []]), "text 1 has no tokens"),
        (lambda: tokens.pad([]), "no texts"),
    )
    path = tmp_path / "ids.txt"
    path.write_text("1 2 3\n4,5\n")
    assert tokens.read_ids(path) == [[1, 2, 3], [4, 5]]
    path.write_text("1 two\n")
    with pytest.raises(ValueError, match=r"ids\.txt does not hold token ids"):
        tokens.read_ids(path)


def test_encode_cuts_and_refuses():
    batch = tokens.encode(TEXTS, word_lengths, max_tokens=5)
    np.testing.assert_array_equal(batch.ids[1], [1, 1, 3, 3, 2])
    np.testing.assert_array_equal(batch.mask[2], [True] * 4 + [False])
    each_is_refused(
        (lambda: tokens.encode(["a", " "], word_lengths, max_tokens=5), "text 1 is empty"),
        (
            lambda: tokens.encode(TEXTS, word_lengths, max_tokens=9, num_positions=8),
            "max_tokens=9 is more than the 8 positions",
        ),
    )


def test_join():
    assert tokens.join(["a b", "c d e", "f", "g h i j"], word_lengths, 6, 9) == [
        "a b c d e",
        "f g h i j",
    ]
    with pytest.raises(ValueError, match="fewer than 99 tokens"):
        tokens.join(TEXTS, word_lengths, 99, 9)
