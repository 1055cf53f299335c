"""What others wrote reaches the terminal and a table as text, never as a command or a formula."""

import io
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from rank_collapse import printed

CONTROLS = ["\x1b]0;owned\x07", "\x9b31m", "\u202eevil", "\u2028", "\u2029", "\r", "\n", "\x7f"]
CONTROLS += ["\ud800"]  # half of a character


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_character_is_printed_as_python_writes_it(control, capsys):
    text = f"folder {control} ‖X‖ é"
    printed.print_lines(text, "second", file=sys.stdout)
    first, second, end = capsys.readouterr().out.split("\n")
    assert first == f"folder {ascii(control)[1:-1]} ‖X‖ é" and (second, end) == ("second", "")
    assert printed.escape_text("plain text, ≤ 9.5e-07 — “quoted”") == (
        "plain text, ≤ 9.5e-07 — “quoted”"
    )


def test_a_warning_is_one_line_without_its_source(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = warnings.showwarning
        try:
            printed.show_warnings_in_lines()
            warnings.warn("divide by\nzero \x1b[31m", RuntimeWarning, stacklevel=1)
            for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
                warnings.warn("old", category, stacklevel=1)
            warnings.warn(301 * "x", UserWarning, stacklevel=1)
        finally:
            warnings.showwarning = shown
    assert capsys.readouterr().err == (
        f"warning: divide by zero \\x1b[31m\nwarning: {299 * 'x'}…\n"
    )


def test_streams_that_are_closed_take_what_is_written(tmp_path):
    """Else the first file that is opened gets number 2, and the messages of other libraries."""
    code = (
        "import os, sys; from rank_collapse import printed; printed.prepare_streams()\n"
        "file = open('file', 'w'); os.write(2, b'of a library'); print('line', file=sys.stderr)\n"
        "os.system('echo of a child >&2'); file.write(f'{sys.stdout} {file.fileno() > 2}')"
    )
    command = f'"{sys.executable}" -c "$CODE" <&- >&- 2>&-'
    environment = os.environ | {"CODE": code, "PYTHONPATH": os.getcwd()}
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "file").read_text() == "None True"


def test_a_stream_prints_what_its_encoding_has(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    printed.prepare_streams()
    print("≤ 1", flush=True)
    assert stream.buffer.getvalue() == b"? 1\n"


def test_lines_are_seen_at_once_where_this_is_asked_for():
    class Stream(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed += 1

    later, at_once = Stream(), Stream()
    printed.print_lines("a", file=later)
    printed.print_lines("a", file=at_once, flush=True)
    assert (later.flushed, at_once.flushed) == (0, 1)


def test_names_are_sorted_by_the_numbers_in_them():
    names = ["block_2", "block_10", "block_10b", "block_x", "x²", "²", "1²"]
    assert sorted(names, key=printed.split_numbers) == ["1²", *names[:4], "x²", "²"]


@pytest.mark.parametrize(
    "cell", ["=HYPERLINK(1)", "+A1", "-A1", "@SUM(A1)", " =1+1", "-", "=1", "\t=1"]
)
def test_no_cell_is_a_formula(cell):
    escaped = printed.escape_cell(cell)
    assert escaped[0] == "'" or "\\t" in escaped
    assert printed.unescape_cell(escaped) == printed.escape_text(cell)


@pytest.mark.parametrize("cell", ["-1.5", "+2", "-inf", "SAN", "a=1", "", "1e-3", "'a'"])
def test_numbers_and_names_stay(cell):
    assert printed.escape_cell(cell) == printed.unescape_cell(cell) == cell
    assert printed.escape_cell(-1.5) == -1.5 and printed.escape_cell(None) is None


def test_a_value_is_quoted_in_one_line_that_says_how_much_is_left_out():
    for length, expected in ((98, f"'{98 * 'x'}'"), (99, f"'{79 * 'x'}… (101 characters)")):
        assert printed.quote_value(length * "x") == expected
    assert printed.quote_value("xyz" * 9, 25) == "'xyzx… (29 characters)"
    matrix = np.eye(2)  # whose text has two lines
    assert printed.quote_value(matrix) == "array([[1., 0.], [0., 1.]])"
    assert printed.format_one_line(ValueError("a\n b"), 3) == "a b"
    assert printed.format_one_line(ValueError(" "), 3) == "Va…"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 layers"), (1, "1 layer"), (2, "2 layers"), (21, "21 layers")]
)
def test_a_number_stands_with_its_noun(count, text):
    assert printed.format_count(count, "layer") == text
