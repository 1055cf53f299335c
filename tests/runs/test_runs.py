"""Run folders: whole files, resume, refusal, one process at a time."""

import csv
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from refusals import each_is_refused

from rank_collapse.runs import provenance
from rank_collapse.runs.files import RunError, difference, make_folder
from rank_collapse.runs.folder import LAYOUT, RunFolder, read_summary

CONFIG = {"depth": 3, "scales": (0.5, 1.0), "name": "a"}


def test_a_run_leaves_everything_and_its_second_opening_finds_it(tmp_path):
    folder = tmp_path / "results" / "x"
    with RunFolder(folder, CONFIG, execution={"num_devices": 2}) as run:
        assert not run.resumed and run.summary is None
        run.log("begun")
        run.write_rows([{"seed": 0, "loss": 0.5}, {"seed": 1, "extra": "x,y"}])
        run.save_arrays({"a/b": jnp.arange(3)})
        figure = Figure()
        figure.subplots().plot([1, 2])
        assert not run.has_figure("f")
        run.save_figure(figure, "f")
        run.finish({"loss": np.float32(0.5), "per_seed": np.arange(2)})
    names = {p.name for p in folder.iterdir()}
    files = {
        "config.json",
        "results.csv",
        "arrays.npz",
        "summary.json",
        "figures",
        "log.txt",
        "SHA256SUMS",
    }
    assert names == files | {".lock"}  # no temporary name is left
    saved = json.loads((folder / "config.json").read_text())
    assert saved["config"]["scales"] == [0.5, 1.0]
    assert saved["execution"] == {"num_devices": 2}
    assert saved["environment"]["versions"]["jax"] == jax.__version__
    with RunFolder(folder, CONFIG) as again:
        assert again.resumed and again.has_figure("f")
        assert again.summary == {"loss": 0.5, "per_seed": [0, 1]}
        np.testing.assert_array_equal(again.arrays["a/b"], [0, 1, 2])
        assert set(again.part("a")) == {"b"} and again.part("a/") is None
    with open(folder / "results.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first == {"seed": "0", "loss": "0.5", "extra": ""} and second["extra"] == "x,y"
    assert read_summary(folder)["loss"] == 0.5
    assert "begun" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("layout", [None, 1, "2"])
def test_a_folder_that_another_version_made_is_refused(tmp_path, layout):
    with RunFolder(tmp_path, CONFIG):
        pass
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    assert saved.pop("layout") == LAYOUT
    path.write_text(json.dumps(saved | ({} if layout is None else {"layout": layout})))
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(RunError, match=f"another version .*layout {layout or 1} there"):
        RunFolder(tmp_path, CONFIG)


def test_what_is_shown_follows_what_is_asked_for(tmp_path):
    """Made anew where other parts are asked for, and not otherwise; a deleted figure comes back."""
    made = []

    def publish(*parts):
        def figure():
            made.append(parts)
            return Figure()

        with RunFolder(tmp_path, CONFIG) as run:
            return run.publish(
                rows=lambda: [{"part": part} for part in parts],
                figures={"f": figure},
                summary=lambda: {"count": len(parts)},
                shown=parts,
            )

    assert publish("a") == publish("a") == {"count": 1, "shown": ["a"]}
    assert publish("a", "b")["count"] == 2 and publish("a", "b")["count"] == 2
    assert (tmp_path / "results.csv").read_text() == "part\na\nb\n"
    assert made == [("a",), ("a", "b")]
    (tmp_path / "figures" / "f.png").unlink()
    publish("a", "b")
    assert made == [("a",), ("a", "b"), ("a", "b")]


def test_another_config_is_refused_with_the_difference_and_overwrite_starts_afresh(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": 1})
        run.finish({})
        run.write_file("models.safetensors", b"weights")
        run.write_file("models/depth-4.npz", b"weights")
        with pytest.raises(ValueError, match=r"'weights/depth-4\.npz' is not one of"):
            run.write_file("weights/depth-4.npz", b"weights")
    (tmp_path / "notes.txt").write_text("mine")
    other = CONFIG | {"depth": 4}
    with pytest.raises(RunError, match="depth is 3 there, 4 here") as caught:
        RunFolder(tmp_path, other)
    assert "name" not in str(caught.value).split(":")[1].split(";")[0]
    with RunFolder(tmp_path, other, overwrite=True) as run:
        assert not run.resumed and run.arrays == {} and run.summary is None
    assert not (tmp_path / "models.safetensors").exists() and not (tmp_path / "models").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (
        difference({"a": 1}, {"b": 1}) == "a is 1 there, 'absent' here; b is 'absent' there, 1 here"
    )


def test_execution_does_not_take_part_in_the_comparison(tmp_path):
    RunFolder(tmp_path, CONFIG, execution={"num_devices": 1}).close()
    with RunFolder(tmp_path, CONFIG, execution={"num_devices": 2}) as run:
        assert run.resumed


def test_a_second_process_is_told_who_holds_the_folder(tmp_path):
    code = (
        "import sys; from rank_collapse.runs import RunError, RunFolder\n"
        "try: RunFolder(sys.argv[1], {})\n"
        "except RunError as e: print(e); sys.exit(2)\n"
    )

    def second():
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
        )

    with RunFolder(tmp_path, {}):
        refused = second()
        assert refused.returncode == 2
        assert f"in use by another process (pid {os.getpid()} on" in refused.stdout
    assert second().returncode == 0


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    each_is_refused(
        (
            lambda: RunFolder(tmp_path / "file" / "run", CONFIG),
            r"cannot write to .*file/run: Not a directory",
        ),
        (lambda: make_folder(tmp_path / "file"), "cannot write"),
        error=RunError,
    )


def test_results_without_a_config_are_not_taken_over(tmp_path):
    (tmp_path / "results.csv").write_text("a\n")
    with pytest.raises(RunError, match="without a config"):
        RunFolder(tmp_path, CONFIG)


def test_another_host_only_reads(tmp_path):
    with RunFolder(tmp_path, CONFIG) as run:
        run.save_arrays({"a": 1})
    before = sorted(p.name for p in tmp_path.iterdir())
    with RunFolder(tmp_path, CONFIG, primary=False) as run:
        run.write_rows([{"a": 1}])
        run.save_arrays({"b": 2})
        run.log("x")
        assert set(run.arrays) == {"a", "b"}
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_checkpoints_resume_and_are_dropped_at_the_end(tmp_path):
    state = {"key": jax.random.key(3), "w": jnp.arange(4.0), "n": np.int32(7)}
    with RunFolder(tmp_path, CONFIG) as run:
        assert run.restore_checkpoint(state) is None
        run.save_checkpoint(10, state)
        run.save_checkpoint(20, state | {"w": state["w"] + 1})
        step, back = run.restore_checkpoint(state)
        assert step == 20 and back["n"] == 7
        np.testing.assert_array_equal(back["w"], [1, 2, 3, 4])
        assert jax.random.normal(back["key"]) == jax.random.normal(state["key"])
        with pytest.raises(RunError, match=r"w of shape \(4,\), not \(5,\)"):
            run.restore_checkpoint(state | {"w": jnp.zeros(5)})
        run.finish({})
        assert not (tmp_path / "checkpoints").exists()


def git_revision_of(folder):
    """`provenance.git_revision` of a copy of its module in a folder."""
    spec = importlib.util.spec_from_file_location("copied", folder / "provenance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.git_revision()


def test_the_git_revision_is_that_of_the_checkout_with_its_changes_or_none(tmp_path):
    copied = tmp_path / "provenance.py"
    shutil.copy(provenance.__file__, copied)

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert git_revision_of(tmp_path) is None
    git("init")
    assert git_revision_of(tmp_path) is None  # a checkout around it, but not its own
    git("add", copied.name)
    git("commit", "--message=first", "--no-verify")
    assert git_revision_of(tmp_path) == git("rev-parse", "HEAD")
    copied.write_text(copied.read_text() + "\n")
    assert git_revision_of(tmp_path) == git("rev-parse", "HEAD") + "+changes"
