"""Damaged files of a run: one line that names the file, never other numbers."""

import errno
import json
import random
import resource
import shutil
import subprocess

import numpy as np
import pytest

from rank_collapse.runs import files, states
from rank_collapse.runs.files import RunError, dump_arrays, load_arrays
from rank_collapse.runs.folder import RunFolder, read_summary

CONFIG = {"depth": 3}
ARRAYS = {
    f"part/{name}": np.random.default_rng(i).normal(size=(5, 7)).astype(np.float32)
    for i, name in enumerate("abcd")
}


def damaged(content, chance):
    """The bytes with some of them changed, a piece cut out, or the end missing."""
    content, kind = bytearray(content), chance.random()
    if kind < 0.6:
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] ^= chance.randint(1, 255)
    elif kind < 0.8:
        start = chance.randrange(len(content))
        del content[start : start + chance.randint(1, 50)]
    else:
        del content[chance.randrange(len(content)) :]
    return bytes(content)


def test_damaged_arrays_are_refused_or_the_same(tmp_path):
    path, chance = tmp_path / "arrays.npz", random.Random(0)
    content = dump_arrays(ARRAYS)
    for _ in range(300):
        path.write_bytes(damaged(content, chance))
        try:
            found = load_arrays(path)
        except RunError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            continue
        assert found.keys() == ARRAYS.keys()
        assert all(found[name].tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)


def test_any_changed_byte_shows(tmp_path):
    """The seal itself may be damaged unseen: the arrays are then read as without one."""
    path, content = tmp_path / "arrays.npz", dump_arrays(ARRAYS)
    for place in range(0, len(content) - 80, 29):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(RunError, match="its checksum is another"):
            load_arrays(path)


def test_arrays_are_an_ordinary_npz_and_one_without_a_checksum_opens(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays(ARRAYS)
    with np.load(tmp_path / "arrays.npz") as saved:
        assert set(saved.files) == set(ARRAYS)
    np.savez_compressed(tmp_path / "arrays.npz", **ARRAYS)  # as earlier versions did
    with RunFolder(tmp_path, CONFIG) as run:
        np.testing.assert_array_equal(run.part("part")["a"], ARRAYS["part/a"])


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", ["[]", "3", "null", '"a"', "[" * 100_000, "{", "\xff"])
def test_json_of_another_type_is_named(tmp_path, name, content):
    with RunFolder(tmp_path, CONFIG) as run:
        run.finish({"loss": 1.0})
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=name):
        RunFolder(tmp_path, CONFIG)
    if name == "summary.json":
        with pytest.raises(RunError, match="summary"):
            read_summary(tmp_path)


def test_a_config_of_another_type_is_refused(tmp_path):
    RunFolder(tmp_path, CONFIG).close()
    (tmp_path / "config.json").write_text(json.dumps({"config": [1]}))
    with pytest.raises(RunError, match="holds no config"):
        RunFolder(tmp_path, CONFIG)


STATE = {"w": np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32), "n": np.int32(7)}


def test_a_damaged_checkpoint_is_refused_or_the_same(tmp_path):
    states.save(tmp_path / "whole", 3, STATE)
    chance = random.Random(1)
    files = sorted(p for p in (tmp_path / "whole").rglob("*") if p.is_file() and p.stat().st_size)
    for case in range(24):
        copy = tmp_path / str(case)
        shutil.copytree(tmp_path / "whole", copy)
        path = copy / chance.choice(files).relative_to(tmp_path / "whole")
        path.write_bytes(damaged(path.read_bytes(), chance))
        try:
            found = states.restore(copy, 3, STATE)
        except ValueError as error:
            assert str(error).startswith("checkpoint 3 ") and "\n" not in str(error)
        else:
            np.testing.assert_array_equal(found["w"], STATE["w"])
            assert found["n"] == 7


def test_a_checkpoint_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    states.save(tmp_path, 1, STATE)
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "1")
    assert checked.returncode == 0
    monkeypatch.setattr(states, "_checkpointer", lambda: pytest.fail("orbax opens it"))
    whole = (tmp_path / "1" / "SHA256SUMS").read_bytes()
    for change in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"\xff" + whole),
        lambda path: (path.write_bytes(whole), (path.parent / "more").write_text("")),
    ):
        change(tmp_path / "1" / "SHA256SUMS")
        with pytest.raises(ValueError, match="checkpoint 1 is damaged: its files are not those"):
            states.restore(tmp_path, 1, STATE)


# Once the error is there, tensorstore's threads may still call an event loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_one_line_and_the_state_before_stays(tmp_path, capfd):
    """A limit on the size of files stands for it: the same errors out of the same libraries."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_checkpoint(1, STATE)
        big = {"w": np.random.default_rng(1).normal(size=20_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            with pytest.raises(RunError, match=r"cannot write to .*checkpoints: File too large"):
                run.save_checkpoint(2, big)
            with pytest.raises(RunError, match=r"cannot write to .*arrays\.npz: File too large"):
                run.save_arrays(big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert capfd.readouterr() == ("", "")
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
        assert run.restore_checkpoint(STATE)[0] == 1
        run.save_checkpoint(2, big)


def test_a_folder_that_is_a_file_is_one_error(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        (tmp_path / "figures").write_text("")
        with pytest.raises(RunError, match=r"cannot write to .*figures: .*exists"):
            run.write_file("figures/a.png", b"")
    RunFolder(tmp_path, CONFIG, overwrite=True).close()


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with RunFolder(tmp_path, {}) as run:
        run.save_arrays({"a": np.ones(2)})
    assert (tmp_path / "arrays.npz").exists()
