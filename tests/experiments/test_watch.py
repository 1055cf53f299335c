"""The command that draws a run while it grows."""

import subprocess
import sys
import time

import pytest
from conftest import REPOSITORY

from experiments import watch
from experiments.shell import cli
from rank_collapse.measures.table import COLLAPSE
from rank_collapse.report.alarms import alarms
from rank_collapse.report.metrics import by_step
from rank_collapse.runs import drawn, folder, metrics
from rank_collapse.runs.files import RunError


@pytest.fixture(autouse=True)
def pictures_as_data(monkeypatch):
    """As of runs, but where the picture itself is the subject."""
    monkeypatch.setattr(watch, "drawn", folder.drawn)


def watched(*arguments):
    return cli.execute(watch.main, watch.FLAGS, arguments, positional="run")


def write(folder, *ratios):
    for step, ratio in enumerate(ratios):
        metrics.append(folder / metrics.NAME, step, {"residual_ratio": [0.9, ratio]})


def test_a_threshold_that_is_passed_is_said_once_and_exits_with_3(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "drawn", drawn.drawn)
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


def test_the_folder_may_come_later(tmp_path, monkeypatch, capsys):
    """As where the run and this are started together."""
    folder = tmp_path / "run"

    def begin(_):
        folder.mkdir()
        write(folder, 0.5)
        (folder / "summary.json").write_text("{}")

    monkeypatch.setattr(watch, "pause", begin)
    assert watched(str(folder)) == 0 and (folder / "figures" / "metrics.png").exists()
    waiting = f"waiting: {folder / metrics.NAME} does not exist; trained experiments write it with"
    assert capsys.readouterr().out.startswith(waiting)
    assert watched(str(folder)) == 0 and "waiting" not in capsys.readouterr().out


def test_steps_alone_are_no_metric(tmp_path, capsys):
    (tmp_path / metrics.NAME).write_text('{"step": 1}\n')
    assert watched(str(tmp_path), "--once") == 0
    assert "no metric yet" in capsys.readouterr().out


def test_a_threshold_on_a_metric_that_never_came_is_a_mistake(tmp_path, capsys):
    write(tmp_path, 0.5)
    metrics.append(tmp_path / metrics.NAME, 9, {"decoder.loss": 1.0})
    assert watched(str(tmp_path), "--once", "--below=resid=0.9", "--above=loss=9") == 2
    wanted = "no metric 'resid' for its threshold; the run has decoder.loss, residual_ratio"
    assert wanted in capsys.readouterr().err
    assert watched(str(tmp_path), "--once", "--above=loss=9") == 0  # of a part of the network


def test_it_ends_with_a_run_of_ones_own(tmp_path, monkeypatch):
    """Which has no summary, but says that it ends."""
    write(tmp_path, 0.5)
    path = tmp_path / metrics.NAME
    monkeypatch.setattr(watch, "pause", lambda _: metrics.finish(path))
    assert watched(str(tmp_path)) == 0
    assert metrics.read(path) and len(path.read_text().splitlines()) == 2
    metrics.append(path, 7, {"loss": 2.0})  # resumed
    monkeypatch.setattr(watch, "pause", lambda _: time.sleep(0.02))
    assert watched(str(path), "--patience=1e-4") == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "which run?"),
        (("nowhere", "--once"), "does not exist"),
        (("x", "y"), "unexpected argument 'y'"),
        (("x", "--below=loss"), "--below=loss is not name=value"),
        (("x", "--above=loss=much"), "--above=loss=much is not name=value"),
        (("x", "--below=loss=٣"), "--below=loss=٣ is not name=value"),
        (("x", "--below=loss=nan"), "--below=loss=nan is not name=value"),
    ],
)
def test_mistakes_are_named_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert watched(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.slow
def test_of_very_many_metrics_some_dozens_are_drawn_and_it_says_so(tmp_path, capsys):
    for step in range(3):
        metrics.append(tmp_path / metrics.NAME, step, {f"m{i}": i + step for i in range(300)})
    begun = time.monotonic()
    assert watched(str(tmp_path), "--once") == 0
    assert "metrics.png shows 36 of 300 metrics" in capsys.readouterr().out
    assert time.monotonic() - begun < 60  # 120 s before


def test_each_line_is_read_once_and_a_file_that_was_begun_afresh_from_its_beginning(tmp_path):
    path = tmp_path / metrics.NAME
    write(tmp_path, 0.5, 0.4)
    reader = metrics.Reader(path)
    assert [row["step"] for row in reader.read()] == [0, 1] and reader.read() == []
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "los')
    assert reader.read() == []
    with open(path, "ab") as file:
        file.write(b's": 1}\n[1]')
    with pytest.raises(RunError, match="line 4: no JSON object"):
        reader.read()
    with open(path, "ab") as file:
        file.write(b"2\n")  # "[1]2" is no JSON: cut off
    assert [row["step"] for row in reader.read()] == [2] and len(reader.rows) == 3
    path.write_bytes(b'{"step": 7, "loss": 1}\n')
    assert [row["step"] for row in reader.read()] == [7] and len(reader.rows) == 1
    path.write_bytes(b'{"step": 8, "loss": 1}\n' * 2 + b'{"step": 9, "loss": 1}\n')  # longer
    assert [row["step"] for row in reader.read()] == [8, 8, 9] and len(reader.rows) == 2
    other = tmp_path / "other"
    other.write_bytes(b'{"step": 1, "loss": 1}\n' * 10)
    other.rename(path)
    assert [row["step"] for row in reader.read()] == [1] * 10 and len(reader.rows) == 1


def test_many_lines_are_read_and_drawn_in_proportion(monkeypatch):
    """10,000 lines took 4.5 s at every look, and 100,000 more than 150 s."""
    rows = [
        {"step": step, "seed": seed, "loss": 1.0} for seed in range(2) for step in range(20_000)
    ]
    begun = time.process_time()
    steps, values = by_step(rows, "loss")
    assert values.shape == (2, 20_000, 1) and len(steps) == 20_000
    assert time.process_time() - begun < 5  # with steps.index 20,000² / 2 comparisons for each seed
    calls = []
    monkeypatch.setattr("rank_collapse.report.alarms._passed", lambda *_: calls.append(1))
    assert alarms(rows, COLLAPSE) == [] and not calls  # a call took 60 µs, of every line


def test_a_metric_of_any_name_is_drawn(tmp_path, monkeypatch):
    """Formulas and control characters: matplotlib refused the one and warned of the other."""
    monkeypatch.setattr(watch, "drawn", drawn.drawn)
    metrics.append(tmp_path / metrics.NAME, 1, {"$\\frac{$": 1.0, "\x1b[31m": 2.0})
    assert watched(str(tmp_path), "--once") == 0
    assert (tmp_path / "figures" / "metrics.png").stat().st_size > 1000


def test_it_follows_a_file_that_grows(tmp_path):
    write(tmp_path, 0.5)
    command = [sys.executable, "-m", "experiments.watch", str(tmp_path), "--every=0.1", "--stop"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "figures" / "metrics.png").exists():
            assert process.poll() is None
        metrics.append(tmp_path / metrics.NAME, 7, {"residual_ratio": [0.9, 1e-6]})
        out, _ = process.communicate(timeout=60)
    assert process.returncode == watch.PASSED and out.startswith("step 7: residual_ratio 1e-06")
