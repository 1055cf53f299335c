"""The documentation's job: pages, examples, pictures, public names, types, commands and the wheel.

`python -m pytest tests_docs` runs it; the usual run of the tests leaves it out. Examples run as
users run them: without the checks that the other suite adds.
"""

import os

import pytest

from tests.support.compiling import pytest_configure  # noqa: F401
from tests.support.untouched import root_stays_as_it_is  # noqa: F401

os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(autouse=True)
def run_in_temporary_folder(tmp_path, monkeypatch):
    """Examples write where they are started."""
    monkeypatch.chdir(tmp_path)
