"""UTF-8 files, tables and JSON: what is read, and what is refused in one line."""

import os

import pytest

from rank_collapse.text import files


def test_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "a"
    path.write_bytes("\ufeffnaïve\r\ntext\rend".encode())
    assert files.read_utf8(path) == "naïve\ntext\nend"
    assert files.read_utf8(str(path)) == "naïve\ntext\nend"


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin is not UTF-8: byte 2 of it$"):
        files.read_utf8(tmp_path / "latin")
    with pytest.raises(FileNotFoundError, match=r"none does not exist$"):
        files.read_utf8(tmp_path / "none")
    with pytest.raises(ValueError, match="latin/below cannot be read: Not a directory"):
        files.read_utf8(tmp_path / "latin" / "below")


def test_only_regular_files_are_opened(tmp_path):
    """A pipe would wait for ever, and /dev/zero has no end: neither is opened."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", "/dev/zero"):
        with pytest.raises(ValueError, match=f"{path} cannot be read: it is not a regular file"):
            files.read_utf8(path)


def test_tables(tmp_path):
    path = tmp_path / "a.tsv"
    long = "x" * 200_000  # the csv package would refuse it
    path.write_text(f'one\ttwo\n1 "\t2\u2028\n\n{long}\n\t4\r\n', encoding="utf-8")
    assert files.read_table(path) == {"one": ['1 "', long, ""], "two": ["2\u2028", "", "4"]}
    path.write_text("one\ttwo\n")
    assert files.read_table(path) == {"one": [], "two": []}


def test_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert files.read_json(path) == {"a": 1}
    for content, message in (("{", "a.json is not JSON"), ("[1]", "a.json holds a list")):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            files.read_json(path)
