"""Two recordings, compared as a user compares them."""

import pytest

from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import record


@pytest.fixture
def compare(tmp_path):
    """Return a function that compares two recordings through files."""

    def compare_arrays(first, second, **arrays):
        record(first, tmp_path / "first.npz", **{k: v[0] for k, v in arrays.items()})
        record(second, tmp_path / "second.safetensors", **{k: v[1] for k, v in arrays.items()})
        return compare_files(tmp_path / "first.npz", tmp_path / "second.safetensors")

    return compare_arrays
