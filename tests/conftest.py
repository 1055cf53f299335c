"""A strict suite: annotations checked, rank promotion refused, several CPU devices."""

import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("MPLBACKEND", "Agg")

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # starts JAX, so that no binary run inside a test changes the number of devices

install_import_hook("rank_collapse", "beartype.beartype")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of reference data beside the repository; skips where it is absent."""
    folder = Path(os.environ.get("RANK_COLLAPSE_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder
