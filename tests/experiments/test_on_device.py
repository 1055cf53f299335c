"""Measuring on a device: both commands at tiny size, time limits, comparison with a CPU, pages."""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from experiments import on_device
from experiments.benchmarks import device_pages
from experiments.lab import cli
from experiments.on_device import Step, read_lines, run_steps
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


def write_run(folder, rows="a,b\n1,x\n,y\n", **arrays):
    folder.mkdir(parents=True)
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "results.csv").write_text(rows)
    return folder


def test_the_largest_difference_is_named(tmp_path):
    same = np.array([1.0, np.nan, np.inf])
    cpu = write_run(tmp_path / "cpu", same=same, other=np.array([1.0, 4.0]), count=np.arange(3))
    device = write_run(
        tmp_path / "device", same=same, other=np.array([1.5, 4.0]), count=np.arange(3)
    )
    assert device_pages.compare_runs("x", device, cpu) == ("x", 4, 3, "other", 0.125)
    nan = write_run(tmp_path / "nan", same=same, other=np.array([np.nan, 4.0]), count=np.arange(3))
    assert device_pages.compare_runs("x", nan, cpu).largest == np.inf
    table = write_run(
        tmp_path / "table",
        "a,b\n3,x\n,y\n",
        same=same,
        other=np.array([1.0, 4.0]),
        count=np.arange(3),
    )
    assert device_pages.compare_runs("x", table, cpu)[3:] == ("results.csv: a", 2.0)
    fewer = write_run(tmp_path / "fewer", same=same)
    with pytest.raises(ValueError, match="has count"):
        device_pages.compare_runs("x", fewer, cpu)


def make_line(name, device="gpu NVIDIA H200 x 1", gigabytes=0, **fields):
    machine = {"date": "2030-01-02", "device": device, "cores": 16, "load": 0.1, "jax": "0.11.0"}
    case = {
        "case": "vmapped",
        "compile_seconds": 1.25,
        "seconds": [0.004, 0.002],
        "gigabytes": gigabytes,
    }
    figures = {
        "TFLOP/s": 51.234,
        "products": 5981.2,
        "CPU ms, vmapped": 3.0,
        "seeds from which": None,
    }
    return {"machine": machine, "benchmark": name, "timings": [case], "figures": figures} | fields


def test_the_page_of_the_device_gets_the_tables(tmp_path):
    for name, kind in (("accelerators", "accelerator"), ("benchmarks", "cpu")):
        text = f"before\n<!-- measured: {kind} -->\nold\n<!-- end -->\nafter\n<!-- end -->\n"
        (tmp_path / f"{name}.md").write_text(text)
    step = {"step": "tests", "code": 0, "last_line": "9 passed in 3 s", "driver": "H200, 580.1"}
    lines = [make_line("products"), make_line("seeds", gigabytes=1.5), step]
    differences = [device_pages.Difference("run_sort", 12, 3, "loss", 1.2e-5)]
    (page,) = device_pages.write_pages(tmp_path, lines, differences)
    assert page.name == "accelerators.md"
    assert page.read_text() == (
        "before\n<!-- measured: accelerator -->\n"
        "Measured on 2030-01-02: gpu NVIDIA H200 x 1 (H200, 580.1), 16 cores, JAX 0.11.0.\n\n"
        + "\n\n".join(
            f"| {name} | ms, fastest round | compiling, s |{head}\n|---|---|---|{line}\n"
            f"| vmapped | 2 | 1.25 |{value}\n\n"
            f"| {name} | |\n|---|---|\n| TFLOP/s | 51.2 |\n| products | 5,981 |\n"
            "| seeds from which | none |"
            for name, head, line, value in (
                ("products", "", "", ""),
                ("seeds", " GB |", "---|", " 1.5 |"),
            )
        )
        + "\n\nTests on the device: 9 passed in 3 s.\n\n"
        "| experiment | arrays, columns | equal to the bit | largest difference from a CPU |\n"
        "|---|---|---|---|\n| run_sort | 12 | 3 | 1.2e-05, loss |\n"
        "<!-- end -->\nafter\n<!-- end -->\n"
    )
    (page,) = device_pages.write_pages(tmp_path, [make_line("products", "cpu cpu x 2")], [])
    assert page.name == "benchmarks.md" and "old" not in page.read_text()


def test_the_pages_have_a_place_for_the_numbers():
    for name, kind in (("accelerators", "accelerator"), ("benchmarks", "cpu")):
        text = (REPOSITORY / f"docs/{name}.md").read_text("utf-8")
        assert text.count(f"<!-- measured: {kind} -->\n") == 1


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
