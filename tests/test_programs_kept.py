"""The compiled programs that the tests keep between runs, in the cache of pytest."""

import os
import types

import conftest
import pytest
from conftest import keep_newest, kept_programs

from experiments.shell import compilation


@pytest.fixture
def config(tmp_path):
    def mkdir(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return folder

    return types.SimpleNamespace(cache=types.SimpleNamespace(mkdir=mkdir))


def test_the_folder_is_the_processors_and_holds_the_newest(config, monkeypatch):
    folder = config.cache.mkdir(f"programs-{compilation.cache_folder().name}")
    for age, name in enumerate("cba"):
        (folder / name).write_bytes(b"12345")
        os.utime(folder / name, (100 - age, 100 - age))
    monkeypatch.setattr(conftest, "MOST_BYTES", 14)
    assert kept_programs(config) == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["b", "c"]
    keep_newest(folder, 10)
    assert len(list(folder.iterdir())) == 2


def test_without_a_folder_that_can_be_written_nothing_is_kept(config, tmp_path, monkeypatch):
    assert kept_programs(types.SimpleNamespace()) is None  # -p no:cacheprovider
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)  # of the superuser it never is
        assert kept_programs(config) is None
    (tmp_path / f"programs-{compilation.cache_folder().name}").rename(tmp_path / "away")
    (tmp_path / f"programs-{compilation.cache_folder().name}").write_text("a file")
    assert kept_programs(config) is None
