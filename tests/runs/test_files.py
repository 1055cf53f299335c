"""Files of a run: replaced as a whole, deleted, locked, compared, checked when they are read."""

import errno
import os
import platform
import re
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab.folder import RunFolder
from rank_collapse.runs import files
from rank_collapse.runs.files import RunError, load_arrays
from tests.support.refusals import is_refused


def test_a_file_that_fails_leaves_the_one_before_and_no_other(tmp_path):
    files.write_atomically(tmp_path / "a.npz", b"before")
    with (
        pytest.raises(KeyboardInterrupt),
        files.open_replacement(tmp_path / "a.npz") as file,
        files.open_replacement(tmp_path / "a.csv") as other,  # of the same stem
    ):
        file.write(b"half")
        other.write(b"other")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    with files.open_replacement(tmp_path / "a.npz") as file:
        file.write(b"after")
        assert len([*tmp_path.glob(".rank_collapse-*.tmp")]) == 1
        files.write_atomically(tmp_path / "a.csv", b"other")
        assert (tmp_path / "a.npz").read_bytes() == b"before"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "a.npz": b"after",
        "a.csv": b"other",
    }


def test_what_killed_processes_left_is_deleted_in_every_folder_and_nothing_else(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    remaining = [tmp_path / "a" / "b" / name for name in ("a.tmp", ".rank_collapse-a.npz")]
    for folder in (tmp_path, tmp_path / "a" / "b"):
        (folder / ".rank_collapse-a.tmp").touch()
    for path in remaining:
        path.touch()
    files.delete_temporary(tmp_path)
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {*remaining}


def test_a_folder_needs_to_be_writable_and_searchable(tmp_path, monkeypatch):
    """Root may do everything, so the answer of the system is simulated."""
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    for lacking in (os.W_OK, os.X_OK):
        monkeypatch.setattr(os, "access", lambda _, mode, lacking=lacking: not mode & lacking)
        is_refused("b: permission denied", files.make_folder, tmp_path / "a" / "b", error=RunError)
    assert (tmp_path / "a" / "b").is_dir()


def test_a_link_among_the_folders_inside_is_named(tmp_path):
    """At any depth, beside folders that are none."""
    inner = tmp_path / "run" / "b" / "c"
    for folder in (inner, tmp_path / "run" / "a", tmp_path / "run" / "d", tmp_path / "else"):
        folder.mkdir(parents=True)
    files.check_no_links(tmp_path, ["absent", "run"])
    for place in (tmp_path / "run" / "e", inner / "link", tmp_path / "run" / "0"):
        place.symlink_to(tmp_path / "else")
        message = f"cannot write to {place}: it is a link, to {tmp_path}/else"
        is_refused(message, files.check_no_links, tmp_path, ["absent", "run"], error=RunError)
        place.unlink()
    files.check_no_links(tmp_path, ["run"])
    (tmp_path / "link").symlink_to(tmp_path / "else")
    message = f"cannot write to {tmp_path}/link: it is a link"
    is_refused(message, files.make_subfolder, tmp_path / "link", error=RunError)
    files.make_subfolder(tmp_path / "new")
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("field", ["comment", "extra"])
def test_entries_that_a_damaged_list_takes_for_a_comment_are_named(tmp_path, field):
    """NumPy writes 20 bytes at most there."""
    path = tmp_path / "a.npz"
    for size, is_damaged in ((20, False), (40, True)):
        entry = zipfile.ZipInfo("a.npy")
        content = bytes([0, 0x80, size - 4, 0]) + bytes(size - 4)  # an extra field of a kind
        setattr(entry, field, content)
        np.savez(path, a=np.arange(3))
        with zipfile.ZipFile(path) as archive:
            data = archive.read("a.npy")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(entry, data)
        if is_damaged:
            is_refused("its list of arrays is damaged", load_arrays, path, error=RunError)
        else:
            assert load_arrays(path)["a"].tolist() == [0, 1, 2]


def test_what_is_deleted_is_what_is_there_and_of_links_the_link(tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    for path in (folder / "old", kept):
        path.mkdir(parents=True)
        (path / "file").write_text("")
    (folder / "link").symlink_to(kept)
    (folder / "a").write_text("")
    (folder / "b").write_text("")
    files.delete_files(folder, ["old", "link", "a", "absent"])
    assert [p.name for p in folder.iterdir()] == ["b"] and (kept / "file").exists()
    is_refused("cannot write to .*run", files.delete_files, folder, ["b/c"], error=RunError)


def test_files_have_the_permissions_of_others_and_logs_leave_other_names_as_they_were(tmp_path):
    """Of a log with a second name, only the name that is opened gets the lines."""
    mask = os.umask(0o027)
    try:
        files.write_atomically(tmp_path / "a", b"first\n")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    for line in (b"second\n", b"third\n"):
        with files.open_log(tmp_path / "a") as file:
            file.write(line)
    assert (tmp_path / "a").read_bytes() == b"first\nsecond\nthird\n"
    assert (tmp_path / "b").read_bytes() == b"first\n"


def test_no_file_is_written_under_a_temporary_name_that_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0")
    (tmp_path / "else").write_text("text")
    (tmp_path / ".rank_collapse-0.tmp").hardlink_to(tmp_path / "else")
    path = tmp_path / "a"
    is_refused("a: File exists$", files.write_atomically, path, b"a", error=RunError)
    assert not path.exists() and (tmp_path / "else").read_text() == "text"


def test_a_lock_that_is_another_file_of_the_user_stays_as_it_is(tmp_path):
    (tmp_path / "text").write_bytes(b"text\xff")
    (tmp_path / ".lock").hardlink_to(tmp_path / "text")
    with files.lock_folder(tmp_path):
        assert (tmp_path / "text").read_bytes() == b"text\xff"
        message = r"in use by another process \(text\ufffd\)"
        is_refused(message, files.lock_folder, tmp_path, error=files.InUseError)


def test_a_lock_says_who_has_it_and_nothing_of_who_had_it(tmp_path):
    (tmp_path / ".lock").write_text("pid 1 on " + 100 * "x")
    with files.lock_folder(tmp_path):
        holder = f"pid {os.getpid()} on {platform.node()}"
        assert (tmp_path / ".lock").read_text() == holder
        message = rf"{tmp_path} is in use by another process \({re.escape(holder)}\)"
        is_refused(message, files.lock_folder, tmp_path, error=files.InUseError)
        assert (tmp_path / ".lock").read_text() == holder
        (tmp_path / ".lock").write_text("")
        is_refused(r"\(unknown\)", files.lock_folder, tmp_path, error=files.InUseError)
    files.lock_folder(tmp_path).close()


@pytest.mark.parametrize("number", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EAGAIN"])
def test_only_a_file_system_without_locks_is_used_without(number, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    if number == "EAGAIN":
        is_refused("in use", files.lock_folder, tmp_path, error=files.InUseError)
    else:
        files.lock_folder(tmp_path).close()
        assert (tmp_path / ".lock").stat().st_mode & 0o600 == 0o600


def test_arrays_come_back_compressed_or_not(tmp_path):
    arrays = {"a/b": np.zeros(1000), "c": np.arange(3), "d": jnp.ones(2, jnp.bfloat16)}
    for name, options in (("small", {}), ("large", {"compressed": False})):
        files.write_arrays(tmp_path / name, arrays, **options)
        back = files.load_arrays(tmp_path / name)
        assert back.keys() == arrays.keys() and back["d"].dtype.itemsize == 2
        np.testing.assert_array_equal(back["c"], [0, 1, 2])
    assert (tmp_path / "small").stat().st_size < 2000 < (tmp_path / "large").stat().st_size


@pytest.mark.parametrize(("size", "damaged"), [(28, False), (29, True)])
def test_an_entry_with_a_long_comment_may_hide_others(size, damaged, tmp_path):
    files.write_arrays(tmp_path / "a.npz", {"a": np.ones(2)}, compressed=False)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.getinfo("a.npy").extra = b""
        archive.getinfo("a.npy").comment = size * b"x"
        archive.writestr("b.npy", archive.read("a.npy"))
    if damaged:
        message = "list of arrays is damaged.; delete this file, and the same command makes it"
        is_refused(message, files.load_arrays, tmp_path / "a.npz", error=RunError)
    else:
        assert files.load_arrays(tmp_path / "a.npz").keys() == {"a", "b"}


def test_objects_among_arrays_are_refused(tmp_path):
    for values in (["a", "b"], [b"a"], np.array([None])):
        np.savez(tmp_path / "a.npz", a=np.asarray(values))
        is_refused("a.npz cannot be read", files.load_arrays, tmp_path / "a.npz", error=RunError)


def test_objects_of_json_are_read_or_named_with_what_helps(tmp_path):
    for name, remedy in (
        ("config.json", "use another folder"),
        ("trainer_state.json", "transformers writes it anew"),
        ("other.json", "delete this file"),
    ):
        path = tmp_path / name
        is_refused(f"{name} cannot be read .*{remedy}", files.read_object, path, error=RunError)
        for content in ("[1]", "{", "[" * 100_000):
            path.write_text(content)
            is_refused(f"{name} cannot be read .*{remedy}", files.read_object, path, error=RunError)
        error = files.damaged_file_error(path, f"a\nb\x07{300 * 'c'}")
        assert f"(a b\\x07{192 * 'c'}…); " in str(error) and remedy in str(error)
        path.write_text('{"a": [1]}')
        assert files.read_object(path) == {"a": [1]}


def test_a_difference_names_each_field_that_either_has():
    old, new = {"b": 1, "a": [1], "same": 1.0, "gone": None}, {"b": 2, "a": [1], "same": 1.0}
    assert files.describe_difference(old, new) == (
        "b is 1 there, 2 here; gone is None there, 'absent' here"
    )
    assert files.describe_difference(new, old).endswith("gone is 'absent' there, None here")
    assert files.describe_difference({"a": 1}, {"a": 1.0}) == "a is 1 there, 1.0 here"
    assert files.describe_difference({"a": True}, {"a": 1}) == "a is True there, 1 here"


def test_arrays_of_texts_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(2), b=np.array(["1.0", "2.0"]))
    is_refused("more than arrays of numbers", load_arrays, tmp_path / "a.npz", error=RunError)


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with RunFolder(tmp_path, {}) as run:
        run.save_arrays({"a": np.ones(2)})
    assert (tmp_path / "arrays.npz").exists()
