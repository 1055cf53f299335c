"""A checkpoint folder that tests change."""

import shutil
from pathlib import Path

import pytest

from tests.support.folders import GOLDEN


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden checkpoint that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"))
