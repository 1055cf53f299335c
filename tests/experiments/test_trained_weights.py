"""trained_weights: packages that are absent, damaged or others than they should be."""

import hashlib

import pytest

from experiments import trained_weights
from experiments.lab import cli
from experiments.trained import packages

ALBERT = "albert-reactions"


def write_package(site, weights=None):
    """Writes what pip leaves of rxnmapper; returns the flags that read it."""
    about = site / "rxnmapper-0.4.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rxnmapper\nVersion: 0.4.3\n")
    path = site / packages.PACKAGES[ALBERT].weights
    path.parent.mkdir(parents=True)
    if weights is not None:
        path.write_bytes(weights)
    return [f"--site={site}", f"--folder={site / 'made'}"]


@pytest.mark.parametrize("weights", [None, b"other weights"])
def test_a_package_that_cannot_be_read_is_skipped_with_a_line(weights, tmp_path, capsys):
    flags = write_package(tmp_path, weights)
    assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 2  # none is left
    skipped, *absent = capsys.readouterr().out.strip().splitlines()
    assert str(tmp_path / packages.PACKAGES[ALBERT].weights) in skipped
    assert ("SHA-256" in skipped) == (weights is not None)
    assert len(absent) == len(packages.PACKAGES) - 1 and not (tmp_path / "made").exists()


@pytest.mark.parametrize("config", ["[]", "{}"])  # of which the second has no vocabulary
def test_a_package_with_other_files_than_its_own_is_skipped(config, tmp_path, monkeypatch, capsys):
    flags = write_package(tmp_path, b"weights")
    package = packages.PACKAGES[ALBERT]
    package = package._replace(sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(packages.PACKAGES, ALBERT, package)
    (tmp_path / package.weights).with_name("config.json").write_text(config)
    (tmp_path / package.weights).with_name("vocab.txt").write_text("")
    assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 2
    assert f"{ALBERT}: skipped" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path, capsys):
    (tmp_path / "a_file").write_text("")
    for name in ("nowhere", "a_file"):
        flags = [f"--site={tmp_path / name}"]
        assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 2
        assert f"{name} is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("has_site", [True, False])
def test_a_folder_that_is_made_is_said_with_its_size(has_site, tmp_path, monkeypatch, capsys):
    """One package is made, one is not installed, one cannot be read: the exit code is 0."""

    def make(weights, folder):
        (folder / "config.json").write_bytes(bytes(600_000))
        (folder / "model.safetensors").write_bytes(bytes(2_600_000))

    def find(package, site):
        assert site == (str(tmp_path) if has_site else None)
        if package.requirement == "broken==1":
            raise ValueError("no\nluck")
        return None if package.requirement == "absent==1" else tmp_path

    requirements = {"a": "made==1", "b": "absent==1", "c": "broken==1"}
    monkeypatch.setattr(
        trained_weights,
        "PACKAGES",
        {n: packages.Package(text, "MIT", "w", "", make) for n, text in requirements.items()},
    )
    monkeypatch.setattr(trained_weights, "find_weights", find)
    flags = [f"--site={tmp_path}"] * has_site + [f"--folder={tmp_path / 'made'}"]
    assert cli.execute(trained_weights.main, trained_weights.FLAGS, flags) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"a: made==1, MIT, 3 MB in {tmp_path / 'made' / 'a'}",
        "b: absent==1 is not installed, skipped",
        "c: skipped: ValueError: no luck",
    ]
