"""Files of texts, tables and JSON: what is read, and what is refused by name."""

import os

from rank_collapse.text import text_files
from tests.support.refusals import is_refused


def test_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "a"
    path.write_bytes("\ufeffnaïve\r\ntext\rend".encode())
    assert text_files.read_utf8(path) == "naïve\ntext\nend"
    assert text_files.read_utf8(str(path)) == "naïve\ntext\nend"


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    is_refused(r"latin is not UTF-8: byte 2 is not", text_files.read_utf8, tmp_path / "latin")
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
