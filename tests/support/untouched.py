"""A check that no test writes into the repository."""

import pytest

from tests.support.folders import REPOSITORY


def list_root() -> set[str]:
    """Names in the repository's root, but those of caches."""
    return {path.name for path in REPOSITORY.iterdir() if path.name[0] not in "._"}


@pytest.fixture(scope="module", autouse=True)
def root_stays_as_it_is():
    """Fails where a module's tests leave something in the root, and removes nothing."""
    before = list_root()
    yield
    assert list_root() == before, "tests write into tmp_path alone"
