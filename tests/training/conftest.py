"""Sweeps that several files of tests read, trained once for each file."""

import pytest

from rank_collapse.training import sweep
from tests.oracles import small_sweeps, swept_networks


@pytest.fixture(scope="module")
def whole():
    """The result of a sweep that was not interrupted."""
    return sweep(swept_networks.init, swept_networks.step, **swept_networks.WHOLE)


@pytest.fixture(scope="module")
def used_folder(tmp_path_factory):
    """The folder of a sweep that is done."""
    folder = tmp_path_factory.mktemp("used")
    small_sweeps.run(folder=folder)
    return folder
