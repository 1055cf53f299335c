"""Files of a folder that somebody else filled: opened where they are regular, refused where not."""

import os
import re

import pytest

from rank_collapse.regular import open_in_place, open_regular, read_regular
from tests.support.refusals import is_refused


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to(tmp_path / "a")  # as the hub's cache has them
    assert read_regular(tmp_path / "a") == read_regular(tmp_path / "link") == b"bytes"
    assert read_regular(tmp_path / "a", max_bytes=5) == b"bytes"
    is_refused("it has 5 bytes, more than 4", read_regular, tmp_path / "a", 4, error=OSError)
    with open_regular(tmp_path / "a") as file:
        assert file.read(2) == b"by"


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "link to a device", "folder"])
@pytest.mark.parametrize("function", [open_regular, read_regular, open_in_place])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind, function):
    path = tmp_path / "a"
    os.mkfifo(tmp_path / "pipe")
    if kind == "pipe":
        path = tmp_path / "pipe"
    elif kind == "device":
        path = "/dev/zero"
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "pipe" if "pipe" in kind else "/dev/zero")
    reason = "not a regular file|is a link|Is a directory"
    number = os.open("/dev/null", os.O_RDONLY)  # the next free one, once it is closed
    os.close(number)
    is_refused(f"({reason}): '{re.escape(str(path))}'$", function, path, error=OSError)
    again = os.open("/dev/null", os.O_RDONLY)
    os.close(again)
    assert again == number  # nothing stayed open


def test_a_file_is_written_where_it_is_and_through_no_link(tmp_path):
    for text in (b"one", b"two"):
        with open_in_place(tmp_path / "log", os.O_APPEND) as file:
            file.write(text)
    with open_in_place(tmp_path / "log") as file:
        assert file.read(3) == b"one"
        file.seek(0)
        file.write(b"TWO")
    assert (tmp_path / "log").read_bytes() == b"TWOtwo"
    (tmp_path / "plain").touch()  # as others of the user are made
    assert (tmp_path / "log").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with open_in_place(tmp_path / "log", os.O_SYNC) as file:  # not at its end
        assert file.read() == b"TWOtwo"
    with open_in_place(tmp_path / "log", os.O_TRUNC) as file:
        file.write(b"new")
    assert (tmp_path / "log").read_bytes() == b"new"
    (tmp_path / "link").symlink_to(tmp_path / "new")
    is_refused("it is a link", open_in_place, tmp_path / "link", error=OSError)
    assert not (tmp_path / "new").exists()
    is_refused("null", open_in_place, "a\0b", error=OSError)
