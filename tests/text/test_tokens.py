"""Texts are read, cut and padded to batches of token ids, or refused in one line."""

import os

import numpy as np
import pytest

from experiments.lab.texts import encode_texts, join_texts, read_text, token_ids, tokenize
from rank_collapse.text import text_files, tokens, words
from tests.support.refusals import each_is_refused, is_refused


def test_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "a"
    path.write_bytes("\ufeffnaïve\r\ntext\rend".encode())
    assert text_files.read_utf8(path) == "naïve\ntext\nend"
    assert text_files.read_utf8(str(path)) == "naïve\ntext\nend"


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    is_refused(r"latin is not UTF-8: byte 2 of it$", text_files.read_utf8, tmp_path / "latin")
    is_refused(
        r"none does not exist$", text_files.read_utf8, tmp_path / "none", error=FileNotFoundError
    )
    is_refused(
        "latin/below cannot be read: Not a directory",
        text_files.read_utf8,
        tmp_path / "latin" / "below",
    )
    os.mkfifo(tmp_path / "pipe")  # which would wait for a writer
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        is_refused("it is not a regular file", text_files.read_utf8, path)


def test_tables(tmp_path):
    path = tmp_path / "a.tsv"
    long = "x" * 200_000  # the csv package would refuse it
    path.write_text(f'one\ttwo\n1 "\t2\u2028\n\n{long}\n\t4\r\n', encoding="utf-8")
    assert text_files.read_table(path) == {"one": ['1 "', long, ""], "two": ["2\u2028", "", "4"]}
    path.write_text("one 1\ttwo\n")
    assert text_files.read_table(path) == {"one 1": [], "two": []}


ABSENT = {"error": FileNotFoundError}


def test_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert text_files.read_json(path) == {"a": 1}
    for content, message in (("{", "a.json is not JSON"), ("[1]", "a.json holds a list")):
        path.write_text(content)
        is_refused(message, text_files.read_json, path)
    for content in ("[" * 100_000, "9" * 5000):  # deeper, and of more digits, than Python reads
        path.write_text(content)
        is_refused("a.json is not JSON", text_files.read_json, path)
    is_refused("none.json does not exist$", text_files.read_json, tmp_path / "none.json", **ABSENT)
    assert text_files.read_utf8(path, max_bytes=5000) == content
    is_refused("5000 bytes, more than 4999$", text_files.read_utf8, path, max_bytes=4999)
    is_refused("5000 bytes, more than 0$", text_files.read_utf8, path, max_bytes=0)
    os.truncate(path, 3_000_000_000)
    is_refused("has 3000000000 bytes, more than 100000000", text_files.read_json, path)


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


@pytest.mark.parametrize("content", ["", "word", "  \n"])
def test_fewer_than_two_tokens_are_refused(content):
    each_is_refused(
        (lambda: token_ids(content, 10), "fewer than 2"),
        (lambda: token_ids("many words here", 1), "fewer than 2"),
    )


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "good").write_text("Some text.\n")
    assert read_text(tmp_path / "good") == "Some text.\n"
    (tmp_path / "empty").write_text(" \n")
    is_refused("empty is empty", read_text, tmp_path / "empty")


def test_windows():
    assert words.cut_windows("a b c d e", 3, 3) == ["a b c", "b c d", "c d e"]
    assert words.cut_windows("a b", 4, 5) == ["a b"]
    assert words.cut_windows("a b c", 9, 2) == ["a b", "b c"]
    assert words.cut_windows("a b c d e f", 2, 2) == ["a b", "e f"]
    assert words.cut_windows("a b c", 1, 2) == ["a b"]


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
    is_refused(r"a\.txt holds no text", tokens.read_texts, path)


def test_read_table(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text('index\tsentence1\tsentence2\tlabel\n0\tA "b\tC.\tentailment\n1\tD\tE\tnot\n')
    assert tokens.read_texts(path) == ['A "b C.', "D E"]
    assert tokens.read_texts(path, ["sentence2"]) == ["C.", "E"]
    is_refused("no column 'title'", tokens.read_texts, path, ["title"])
    path.write_text("index\tlabel\n0\t1\n")
    is_refused("no column of text; its columns are", tokens.read_texts, path)


def test_cells_that_are_empty_leave_no_gap_and_rows_of_nothing_no_text(tmp_path):
    path = tmp_path / "DEV.TSV"
    path.write_text("text\tsentence2\tsentence1\nx\tb\ta\n\tb\t\n\t\t\nz\t\ta\n")
    assert tokens.read_texts(path) == ["a b x", "b", "a z"]
    assert tokens.read_texts(path, ("text",), limit=1) == ["x"]
    assert tokens.read_texts(path, ["text", "sentence1"], 2) == ["x a", "z a"]
    path.write_text("sentence\n\t\n")
    is_refused("DEV.TSV holds no text", tokens.read_texts, path)


def test_lines_are_texts_where_no_empty_line_stands_between_them(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\nOne  two.\n Three.\n\n\n")
    assert tokens.read_texts(path) == ["One two.", "Three."]
    path.write_text("One\n\n\n\nTwo\tthree\n")
    assert tokens.read_texts(path) == ["One", "Two three"]
    assert tokens.parse_ids([" 1 ,2\n"], "here") == [[1, 2]]
    path.write_text("1, 2\n3  -4,5\n\n")
    assert tokens.read_ids(path, 1) == [[1, 2]] and tokens.read_ids(path) == [[1, 2], [3, -4, 5]]


def test_a_text_is_cut_before_its_last_token():
    for max_tokens, expected in ((5, [1, 2, 3, 4]), (4, [1, 2, 3, 4]), (3, [1, 2, 4]), (1, [4])):
        assert tokens.cut_text([1, 2, 3, 4], max_tokens) == expected


def test_the_shipped_text_has_about_500_words():
    text = words.default_text()
    assert 400 < len(text.split()) < 600 and text.isascii()


def test_rte(shared_data):
    texts = tokens.read_texts(shared_data / "RTE" / "dev.tsv")
    assert len(texts) == 277 and texts[0].endswith("Christopher Reeve had an accident.")


def test_pad_and_ids(tmp_path):
    batch = tokens.pad_sequences([[3, 4, 5], [6]], vocab_size=7)
    np.testing.assert_array_equal(batch.ids, [[3, 4, 5], [6, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[True, True, True], [True, False, False]])
    np.testing.assert_array_equal(batch.lengths, [3, 1])
    assert (
        batch.ids.dtype == np.int32 and tokens.pad_sequences([[2**31 - 1]]).ids[0, 0] == 2**31 - 1
    )
    for bad, message in (([[7]], "id 7 of text 0"), ([[1], [-2, 3]], "id -2 of text 1")):
        is_refused(message, tokens.pad_sequences, bad, vocab_size=7)
    each_is_refused(
        (lambda: tokens.pad_sequences([[1], []]), "text 1 has no tokens"),
        (lambda: tokens.pad_sequences([]), "no texts"),
    )
    path = tmp_path / "ids.txt"
    path.write_text("1 2 3\n4,5\n")
    assert tokens.read_ids(path) == [[1, 2, 3], [4, 5]]
    for line in ("1 two\n", "5,,8\n"):
        path.write_text(line)
        is_refused(r"ids\.txt does not hold token ids", tokens.read_ids, path)


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


def test_join():
    assert join_texts(["a b", "c d e", "f", "g h i j"], word_lengths, 6, 9) == [
        "a b c d e",
        "f g h i j",
    ]
    is_refused("fewer than 99 tokens", join_texts, TEXTS, word_lengths, 99, 9)
