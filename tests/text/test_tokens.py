"""Texts are read, cut and padded to batches of token ids, or refused in one line."""

import numpy as np

from rank_collapse.text import tokens
from tests.support.refusals import each_is_refused, is_refused


def test_read_texts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One text\nover two lines.\n\nAnother.\n\n\n")
    assert tokens.read_texts(path) == ["One text over two lines.", "Another."]
    path.write_text("One\ntext.\n \nAnother.\n")  # spaces in the empty line
    assert tokens.read_texts(path) == ["One text.", "Another."]
    path.write_text("One\u2028text.\nAnother.\n")  # no end of a line in a file
    assert tokens.read_texts(path) == ["One text.", "Another."]
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
    is_refused("no column 'title'", tokens.read_texts, path, ["sentence1", "title", "body"])
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
