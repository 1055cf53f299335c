"""The caches of compiled programs, of users and of the tests: where they are, and what is kept."""

import os

import jax
import pytest
from conftest import keep_newest
from two_processes import python

from experiments.shell import compilation


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """JAX without a cache folder, and a home of its own; everything as before afterwards."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_cache_is_the_users_and_the_processors(no_cache):
    compilation.keep_programs()
    folder = compilation.cache_folder()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.is_dir() and folder.parent == no_cache / "rank_collapse"


def test_a_folder_that_was_chosen_stays(no_cache):
    jax.config.update("jax_compilation_cache_dir", "chosen")
    compilation.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "chosen" and not no_cache.exists()


def test_without_a_folder_nothing_is_kept(no_cache, monkeypatch):
    no_cache.write_text("a file where the folder would be")
    compilation.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


DAMAGED = """
import pathlib, sys, warnings, jax
from experiments.shell import compilation
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
compilation.keep_programs()
add = jax.jit(lambda x: x + 3)
add(1.0)
(entry,) = pathlib.Path(sys.argv[1]).glob("jit*-cache")
whole = entry.read_bytes()
entry.write_bytes(whole[: len(whole) // 2])
jax.clear_caches()
assert add(1.0) == 4
assert len(entry.read_bytes()) > len(whole) / 2, "never written again"
warnings.warn("mine")
"""


def test_a_cut_entry_is_written_again(tmp_path):
    """JAX compiled its program in every later run, with a warning."""
    found = python("-c", DAMAGED, str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert "mine" in found.stderr and "persistent" not in found.stderr


def test_the_tests_keep_the_newest_programs(tmp_path):
    for age, name in enumerate("cba"):
        (tmp_path / name).write_bytes(b"12345")
        os.utime(tmp_path / name, (100 - age, 100 - age))
    keep_newest(tmp_path, 14)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
