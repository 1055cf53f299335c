"""Measuring on a device: both commands at tiny size, time limits, comparison with a CPU, pages."""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from experiments import on_device
from experiments.lab import cli
from experiments.on_device import Step, read_lines, run_steps
from tests.oracles.device_lines import make_line
from tests.support.folders import REPOSITORY


def execute(*arguments):
    return cli.execute(on_device.main, on_device.FLAGS, arguments)


def measure(part, folder):
    environment = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    script = REPOSITORY / "experiments/on_device.sh"
    command = [str(script), part, str(folder), "--tiny"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.full
def test_the_first_command_tests_and_packs_arrays_that_equal_themselves(tmp_path):
    done = measure("right", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = {line["step"]: line for line in read_lines(tmp_path / "steps.jsonl")}
    assert {name: line["code"] for name, line in steps.items()} == {
        "products": 0,
        "reproduce": 0,
        "tests": 0,
    }
    assert "passed" in steps["tests"]["last_line"]
    with tarfile.open(tmp_path / "arrays.tar.gz") as archive:
        archive.extractall(tmp_path / "cpu", filter="data")
    (comparison,) = on_device.compare_arrays(tmp_path / "arrays.tar.gz", tmp_path / "cpu/quick")
    assert comparison.run == "run_path_counts" and comparison.arrays == comparison.equal > 0


@pytest.mark.full
def test_the_second_command_measures_and_fills_the_pages(tmp_path):
    done = measure("speed", tmp_path)
    assert done.returncode == 0 or "over the limit" in done.stdout, done.stdout + done.stderr
    names = [line["benchmark"] for line in read_lines(tmp_path / "speed.jsonl")]
    assert names == [
        "products",
        "train_sort",
        "log_profile",
        "collapse_sweep, 1 seeds",
        "collapse_sweep, 3 seeds",
        *(f"seeds, {network}" for network in ("mlp", "sort", "cnn")),
    ]
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "benchmarks.md").write_text((REPOSITORY / "docs/benchmarks.md").read_text("utf-8"))
    assert execute("--pages", f"--folder={tmp_path}", f"--docs={docs}") == 0
    page = (docs / "benchmarks.md").read_text("utf-8")
    assert "| train_sort | ms, fastest round |" in page and "TFLOP/s, bfloat16" in page


def test_what_takes_longer_is_stopped_with_what_it_started(tmp_path, capsys):
    pid_file = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)"
    )
    steps = [Step("long", ["-c", program], 4), Step("short", ["-c", "print('at once')"], 60)]
    begun = time.monotonic()
    assert run_steps(steps, tmp_path, begun + 100) == [1, 0]
    assert time.monotonic() - begun < 60
    lines = {line["step"]: line for line in read_lines(tmp_path / "steps.jsonl")}
    assert lines["long"]["code"] is None and lines["short"]["code"] == 0
    assert lines["short"]["last_line"] == "at once"
    assert "long: stopped after" in capsys.readouterr().out
    if pid_file.exists():
        wait_until_ended(int(pid_file.read_text()))


def wait_until_ended(pid, seconds=20):
    """Waits for a killed process, which ends as soon as it gets a core."""
    end = time.monotonic() + seconds
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "zombie" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < end
            time.sleep(0.1)


def test_wrong_uses_are_one_line(tmp_path, capsys):
    (tmp_path / "speed.jsonl").write_text('{"benchmark": "a"}\nnot JSON\n')
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ([], "needed"),
        (["--part=right"], "needed"),
        (["--part=right", "--pages", f"--folder={tmp_path}"], "needed"),
        (["--part=fast", f"--folder={tmp_path}"], "--part"),
        (["--pages", f"--folder={tmp_path}"], "line 2 is damaged"),
        (["--pages", f"--folder={tmp_path}/empty"], "nothing was measured"),
        (["--pages", f"--folder={tmp_path}/empty", "--cpu=/nowhere"], "--cpu=/nowhere"),
    ):
        assert execute(*arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    (tmp_path / "speed.jsonl").write_text(json.dumps(make_line("products")))
    (tmp_path / "accelerators.md").write_text("no place")
    for docs, words in (("empty", "cannot be read"), (".", "has no line <!-- measured")):
        assert execute("--pages", f"--folder={tmp_path}", f"--docs={tmp_path / docs}") == 2
        assert words in capsys.readouterr().err
