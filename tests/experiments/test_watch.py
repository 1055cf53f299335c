"""The command that draws a run while it grows."""

import subprocess
import sys

import pytest
from conftest import REPOSITORY

from experiments import watch
from experiments.shell import cli
from rank_collapse.runs import metrics


def watched(*arguments):
    return cli.execute(watch.main, watch.FLAGS, arguments, positional="run")


def write(folder, *ratios):
    for step, ratio in enumerate(ratios):
        metrics.append(folder / metrics.NAME, step, {"residual_ratio": [0.9, ratio]})


def test_a_threshold_that_is_passed_is_said_once_and_exits_with_3(tmp_path, capsys):
    write(tmp_path, 0.5, 1e-3, 1e-4)
    assert watched(str(tmp_path), "--once") == watch.PASSED
    out = capsys.readouterr().out
    assert out.count("rank collapse") == 1 and "step 1: residual_ratio 0.001 below 0.01" in out
    assert (tmp_path / "figures" / "metrics.png").stat().st_size > 1000
    assert watched(str(tmp_path / metrics.NAME), "--once", "--below=residual_ratio=1e-5") == 0


def test_a_loss_that_is_no_number_is_said_once_whatever_else_is_looked_for(
    tmp_path, capsys, monkeypatch
):
    lost = {"loss": float("nan")}

    def go_on(_):
        metrics.append(tmp_path / metrics.NAME, 5, lost, seed=1)
        (tmp_path / "summary.json").write_text("{}")

    monkeypatch.setattr(watch, "pause", go_on)
    metrics.append(tmp_path / metrics.NAME, 4, lost, seed=1)
    assert watched(str(tmp_path), "--above=loss=5") == watch.PASSED
    out = capsys.readouterr().out
    assert out.startswith("step 4: loss nan is not finite of seed 1 (divergence)\n1 thresholds")


def test_each_network_of_several_has_its_picture_and_its_alarms(tmp_path, capsys):
    for network, ratio in (("deep", 1e-5), ("flat", 0.5)):
        path = tmp_path / metrics.FOLDER / f"{network}.jsonl"
        metrics.append(path, 3, {"residual_ratio": [0.9, ratio]}, seed=0)
    assert watched(str(tmp_path), "--once") == watch.PASSED
    out = capsys.readouterr().out
    assert out.startswith("deep: step 3: residual_ratio 1e-05") and "1 thresholds" in out
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"metrics-deep.png", "metrics-flat.png"}
    assert watched(str(path), "--once") == 0  # the file alone, in the same run
    assert str(tmp_path / "figures" / "metrics-flat.png") in capsys.readouterr().out


def test_the_folder_may_come_later(tmp_path, monkeypatch):
    """As where the run and this are started together."""
    folder = tmp_path / "run"

    def begin(_):
        folder.mkdir()
        write(folder, 0.5)
        (folder / "summary.json").write_text("{}")

    monkeypatch.setattr(watch, "pause", begin)
    assert watched(str(folder)) == 0 and (folder / "figures" / "metrics.png").exists()


def test_steps_alone_are_no_metric(tmp_path, capsys):
    (tmp_path / metrics.NAME).write_text('{"step": 1}\n')
    assert watched(str(tmp_path), "--once") == 0
    assert "no metric yet" in capsys.readouterr().out


def test_it_ends_with_the_run(tmp_path):
    write(tmp_path, 0.5)
    (tmp_path / "summary.json").write_text("{}")
    assert watched(str(tmp_path)) == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "which run?"),
        (("nowhere", "--once"), "is not there"),
        (("x", "y"), "unexpected argument 'y'"),
        (("x", "--below=loss"), "--below=loss is not name=value"),
        (("x", "--above=loss=much"), "--above=loss=much is not name=value"),
    ],
)
def test_mistakes_are_named_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert watched(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_it_follows_a_file_that_grows(tmp_path):
    write(tmp_path, 0.5)
    command = [sys.executable, "-m", "experiments.watch", str(tmp_path), "--every=0.1", "--stop"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "figures" / "metrics.png").exists():
            assert process.poll() is None
        metrics.append(tmp_path / metrics.NAME, 7, {"residual_ratio": [0.9, 1e-6]})
        out, _ = process.communicate(timeout=60)
    assert process.returncode == watch.PASSED and out.startswith("step 7: residual_ratio 1e-06")
