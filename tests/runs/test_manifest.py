"""The checksums of a run's files: one changed byte in any of them is found and mended or named."""

import json
import subprocess

import numpy as np
import pytest
from matplotlib.figure import Figure
from refusals import is_refused

from rank_collapse.runs import manifest
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder, read_summary

CONFIG = {"depth": 3}
MADE_AGAIN = ["results.csv", "summary.json", "report.html", "figures/f.png", "figures/f.pdf"]
NAMED = ["config.json", "arrays.npz", "models.safetensors", "models/a.npz", "metrics.jsonl"]


def run(folder, monitor=True):
    """A whole run; what it computed this time."""
    computed = []

    def measure():
        computed.append("results")
        return {"x": np.arange(3.0)}

    def figure():
        drawing = Figure()
        drawing.subplots().plot([1, 2])
        return drawing

    def weights(name):
        computed.append(name)
        return name.encode() * 50

    with RunFolder(folder, CONFIG) as opened:
        x = opened.cached("results", measure)["x"]
        if not (folder / "metrics.jsonl").exists():
            computed.append("metrics.jsonl")
            opened.append_metrics(1, {"loss": 0.5}, seed=0)
        opened.publish(
            rows=lambda: [{"x": value} for value in x],
            figures={"f": figure},
            files={"report.html": lambda: b"<p>"}
            | {n: lambda n=n: weights(n) for n in ("models.safetensors", "models/a.npz")},
            summary=lambda: {"mean": float(x.mean())},
        )
    return computed


def content(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "log.txt"}


def flip(path, place=0.4):
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(bytes(data))


def test_sha256sum_finds_every_file_whole(tmp_path):
    assert not manifest.whole(tmp_path, "summary.json")
    assert len(run(tmp_path)) == 4 and run(tmp_path) == []
    listed = {
        line.split("  ")[1]
        for line in (tmp_path / manifest.NAME).read_text().splitlines()
        if not line.startswith("#")
    }
    assert listed == {*MADE_AGAIN, *NAMED}
    checked = subprocess.run(["sha256sum", "-c", "--quiet", manifest.NAME], cwd=tmp_path)
    assert checked.returncode == 0 and manifest.whole(tmp_path, "summary.json")
    flip(tmp_path / "results.csv")
    assert not manifest.whole(tmp_path, "summary.json")


def folder_instead(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, lambda p: p.write_bytes(b""), folder_instead])
@pytest.mark.parametrize("name", MADE_AGAIN)
def test_what_is_made_of_the_arrays_is_made_again(name, damage, tmp_path):
    run(tmp_path)
    before = content(tmp_path)
    damage(tmp_path / name)
    if name == "summary.json":
        is_refused(
            "has no summary: the run is not complete", read_summary, tmp_path, error=RunError
        )
    assert run(tmp_path) == [] and content(tmp_path) == before
    assert (
        f"{name} was not as it was written: it is made again" in (tmp_path / "log.txt").read_text()
    )


@pytest.mark.parametrize("name", NAMED)
def test_of_other_files_the_one_to_delete_is_named(name, tmp_path):
    run(tmp_path)
    before = content(tmp_path)
    flip(tmp_path / name)
    for _ in range(2):
        is_refused(
            f"{name} cannot be read .*; delete this file, and", run, tmp_path, error=RunError
        )
    (tmp_path / name).unlink()
    made = run(tmp_path)
    assert made == ([] if name == "config.json" else ["results"] if "arrays" in name else [name])
    for path, data in content(tmp_path).items():
        if path.name not in ("config.json", manifest.NAME):  # its time is another
            assert data == before[path], path


def test_a_config_that_was_deleted_comes_back_for_the_same_flags_alone(tmp_path):
    run(tmp_path)
    (tmp_path / "config.json").unlink()
    is_refused(
        r"results without a config\.json of this config",
        RunFolder,
        tmp_path,
        {"depth": 4},
        error=RunError,
    )
    assert run(tmp_path) == []
    assert json.loads((tmp_path / "config.json").read_text())["config"] == CONFIG


def test_damaged_checksums_are_named_and_a_folder_without_any_opens(tmp_path):
    run(tmp_path)
    for place in (0.01, 0.5, 0.99):
        flip(tmp_path / manifest.NAME, place)
        is_refused(r"SHA256SUMS cannot be read .*; delete this file", run, tmp_path, error=RunError)
        flip(tmp_path / manifest.NAME, place)
    before = content(tmp_path)
    (tmp_path / manifest.NAME).unlink()
    for name in MADE_AGAIN:  # of which nothing knows any more that they were changed
        flip(tmp_path / name)
    assert not manifest.whole(tmp_path, "summary.json")
    assert run(tmp_path) == [] and content(tmp_path) == before
    flip(tmp_path / "models.safetensors")  # from then on all is noticed again
    is_refused("its checksum does not match", run, tmp_path, error=RunError)
    flip(tmp_path / "models.safetensors")
    (tmp_path / manifest.NAME).unlink()
    flip(tmp_path / "arrays.npz")
    is_refused(r"arrays\.npz cannot be read \(its checksum", run, tmp_path, error=RunError)


def test_with_the_arrays_goes_what_was_made_of_them(tmp_path):
    """The summary of the old ones said that the run was complete: its new states were kept."""

    def measure(scale):
        with RunFolder(tmp_path, CONFIG) as opened:
            opened.drop_metrics([0])
            opened.append_metrics(1, {"loss": scale}, seed=0)

            def compute():
                opened.save_checkpoint(1, {"w": np.ones(2)})
                return {"x": np.full(2, scale)}

            x = opened.cached("results", compute)["x"]
            return opened.publish(summary=lambda: {"mean": float(x.mean())})

    assert measure(1.0) == {"mean": 1.0}
    (tmp_path / "arrays.npz").unlink()
    assert measure(2.0) == {"mean": 2.0}
    assert not (tmp_path / "checkpoints").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_file_that_is_written_again_has_no_checksum_until_it_is_whole(tmp_path, monkeypatch):
    run(tmp_path)
    with RunFolder(tmp_path, CONFIG) as opened:
        opened.save_arrays({"more/y": np.ones(2)})
        monkeypatch.setattr(RunFolder, "_seal", lambda _: None)  # as if it was killed here
    with RunFolder(tmp_path, CONFIG) as opened:
        assert set(opened.arrays) == {"results/x", "more/y"}


def test_a_finished_run_that_is_read_only_is_shown_and_left_alone(tmp_path, monkeypatch):
    """Root may write everywhere, so the answer of the system is simulated."""
    run(tmp_path)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.rglob("*")}
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert run(tmp_path) == []
    with RunFolder(tmp_path, CONFIG) as opened:
        assert opened.summary == {"mean": 1.0} and not opened.primary
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in tmp_path.rglob("*")} == before
    is_refused("depth is 3 there, 4 here", RunFolder, tmp_path, {"depth": 4}, error=RunError)
    (tmp_path / "summary.json").unlink()  # what is not finished has to be written to
    for overwrite in (True, False):
        is_refused(
            r"cannot write to .*: permission denied",
            RunFolder,
            tmp_path,
            CONFIG,
            overwrite=overwrite,
            error=RunError,
        )
