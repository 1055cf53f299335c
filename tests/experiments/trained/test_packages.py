"""Folders of packages: an interrupt leaves the folder of before."""

import pytest

from experiments.trained import packages


def test_an_interrupt_leaves_the_folder_of_before(tmp_path):
    def make(weights, folder):
        (folder / "config.json").write_text(weights)
        if weights == "new":
            raise KeyboardInterrupt

    package = packages.Package("a==1", "MIT", "w", "0", make)
    packages.make_folder(package, "old", tmp_path / "made")
    with pytest.raises(KeyboardInterrupt):
        packages.make_folder(package, "new", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / "config.json").read_text() == "old"
