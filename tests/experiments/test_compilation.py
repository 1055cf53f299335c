"""The cache of compiled programs: where it is, and what turns it off."""

import jax
import pytest

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
