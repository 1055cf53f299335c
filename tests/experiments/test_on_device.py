"""Measuring on a device: both commands at tiny size, time limits, comparison with a CPU, pages."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import on_device
from experiments.lab import cli
from experiments.on_device import Step, read_lines, run_steps
from tests.oracles.device_lines import make_line
from tests.support.folders import REPOSITORY
from tests.support.refusals import is_refused


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
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True)))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
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
    assert 4 <= lines["long"]["seconds"] < 60 and 0 <= lines["short"]["seconds"] < 60
    if pid_file.exists():
        assert lines["long"]["last_line"] == "saved"  # it was asked to end
        wait_until_ended(int(pid_file.read_text()))


def test_no_step_goes_on_after_the_end_of_the_session(tmp_path):
    step = Step("late", ["-c", "import time; time.sleep(20)"], 600)
    assert run_steps([step], tmp_path, time.monotonic()) == [1]


def test_steps_are_stopped_where_a_later_one_does_not_start(tmp_path, monkeypatch):
    stopped, processes = [], iter(["first", "second"])
    monkeypatch.setattr(on_device.subprocess, "Popen", lambda *_, **__: next(processes))
    monkeypatch.setattr(on_device, "_stop", stopped.append)
    with pytest.raises(StopIteration):
        run_steps([Step(name, [], 9) for name in "abc"], tmp_path, time.monotonic() + 9)
    assert stopped == ["second", "first"]


def test_what_does_not_end_when_it_is_asked_is_killed(monkeypatch):
    asked, waited = [], []

    def wait(seconds):
        waited.append(seconds)
        raise subprocess.TimeoutExpired("a", seconds)

    process = SimpleNamespace(pid=12, poll=lambda: None, wait=wait)
    monkeypatch.setattr(on_device.os, "killpg", lambda *arguments: asked.append(arguments))
    on_device._stop(process)
    assert asked == [(12, signal.SIGTERM), (12, signal.SIGKILL)]
    assert waited == [on_device.PATIENCE] * 2
    asked.clear()
    on_device._stop(SimpleNamespace(pid=12, poll=lambda: 0, wait=wait))
    assert asked == []


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


def test_a_step_has_its_variables_whatever_the_caller_has_set(tmp_path, monkeypatch):
    """A step without variables has the caller's."""
    monkeypatch.setenv("JAX_PLATFORMS", "caller's")
    started = []

    def start(command, env, cwd, stdout, **others):
        assert command[0] == sys.executable and cwd == REPOSITORY
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        assert others == streams | {"start_new_session": True}
        started.append((command[1:], env["JAX_PLATFORMS"]))
        stdout.write(b"first\n" + b"a" * 100 + b"b" * 300 + b"\n")
        stdout.flush()
        return SimpleNamespace(poll=lambda: 0, wait=lambda _: 0, returncode=0)

    monkeypatch.setattr(on_device.subprocess, "Popen", start)
    monkeypatch.setattr(on_device, "read_driver", lambda: "H200, 580.1")
    steps = [Step("own", ["a", "b"], 9, {"JAX_PLATFORMS": "cpu"}), Step("other", ["c"], 9)]
    assert run_steps(steps, tmp_path, time.monotonic() + 9) == [0, 0]
    assert started == [(["a", "b"], "cpu"), (["c"], "caller's")]
    for line, name in zip(read_lines(tmp_path / "steps.jsonl"), ("own", "other"), strict=True):
        assert line.pop("seconds") < 5 and line == {
            "step": name,
            "code": 0,
            "last_line": "b" * 300,
            "driver": "H200, 580.1",
            "python": platform.python_version(),
        }


def test_pages_are_of_all_lines_and_of_the_comparison(tmp_path, monkeypatch, capsys):
    """Benchmarks come before steps, and runs on a CPU are compared where there are some."""
    (tmp_path / "speed.jsonl").write_text('{"benchmark": "a"}\n')
    (tmp_path / "steps.jsonl").write_text('{"step": "b"}\n')
    written = []

    def write_pages(*arguments):
        written.append(arguments)
        return ["page.md"]

    monkeypatch.setattr(on_device.device_pages, "write_pages", write_pages)
    monkeypatch.setattr(on_device, "compare_arrays", lambda *arguments: [arguments])
    flags = "--pages", f"--folder={tmp_path}", f"--docs={tmp_path / 'docs'}"
    assert execute(*flags) == execute(*flags, f"--cpu={tmp_path}") == 0
    lines = [{"benchmark": "a"}, {"step": "b"}]
    pair = tmp_path / "arrays.tar.gz", tmp_path
    assert written == [(tmp_path / "docs", lines, []), (tmp_path / "docs", lines, [pair])]
    assert capsys.readouterr().out == "written to page.md\n" * 2


@pytest.mark.parametrize("is_tiny", [False, True])
def test_golden_steps_of_a_session(is_tiny, golden, monkeypatch):
    monkeypatch.setattr(on_device.os, "cpu_count", lambda: 16)
    lines = []
    for part in on_device.LIMITS:
        groups = on_device.list_steps(part, Path("FOLDER"), Path("RUNS"), is_tiny)
        lines += [f"{part} {number}: {step}" for number, g in enumerate(groups) for step in g]
    golden(f"benchmarks/steps{'_tiny' * is_tiny}.txt", "\n".join(lines))


@pytest.mark.parametrize("cores, processes", [(None, 1), (4, 1), (12, 7), (64, 9)])
def test_tests_leave_cores_to_the_experiments(cores, processes, monkeypatch):
    monkeypatch.setattr(on_device.os, "cpu_count", lambda: cores)
    (_, (_, tests)) = on_device.list_steps("right", Path("a"), Path("b"), False)
    assert f"-n{processes}" in tests.command


def test_a_session_runs_all_groups_and_packs_what_it_has(tmp_path, monkeypatch, capsys):
    seen, codes = [], iter([[0], [0, 3]])

    def run_group(steps, folder, end):
        names = [step.name for step in steps]
        seen.append(names)
        left = on_device.LIMITS["right"] - on_device.RESERVE
        assert folder == tmp_path / "made" and left - 40 < end - time.monotonic() <= left
        if "reproduce" in names:
            assert "--only=run_path_counts" in steps[0].command  # sizes are tiny
            (runs,) = (a for a in steps[0].command if a.startswith("--output_dir="))
            make_run(Path(runs.removeprefix("--output_dir=")) / "quick" / "run_x")
        return next(codes)

    monkeypatch.setattr(on_device, "run_steps", run_group)
    monkeypatch.chdir(tmp_path)  # steps run in another folder
    assert execute("--part=right", "--folder=made", "--tiny") == 1
    assert seen == [["products"], ["reproduce", "tests"]]
    with tarfile.open(tmp_path / "made" / "arrays.tar.gz") as archive:
        names = archive.getnames()
    kept = ("arrays.npz", "results.csv", "summary.json")
    assert names == [f"quick/run_x/{name}" for name in kept]
    capsys.readouterr()


def test_what_was_measured_before_a_session_broke_is_packed(tmp_path, monkeypatch):
    def break_off(steps, folder, end):
        if len(steps) == 1:
            return [0]
        (runs,) = (a for a in steps[0].command if a.startswith("--output_dir="))
        make_run(Path(runs.removeprefix("--output_dir=")) / "quick" / "run_x")
        raise KeyboardInterrupt

    monkeypatch.setattr(on_device, "run_steps", break_off)
    assert execute("--part=right", f"--folder={tmp_path}") == 130
    with tarfile.open(tmp_path / "arrays.tar.gz") as archive:
        assert "quick/run_x/arrays.npz" in archive.getnames()


@pytest.mark.parametrize(
    ("programs", "fails"),
    [
        (["pass"], False),
        (["raise SystemExit(3)", "pass"], True),
        (["import os; os.kill(os.getpid(), 9)"], True),
        (["pass", "import os; os.kill(os.getpid(), 15)", "pass"], True),
    ],
)
def test_a_session_fails_if_a_step_fails_or_is_killed(programs, fails, tmp_path, monkeypatch):
    steps = [[Step(f"step {i}", ["-c", code], 60)] for i, code in enumerate(programs)]
    monkeypatch.setattr(on_device, "list_steps", lambda *arguments: steps)
    ends, run_group, begun = [], on_device.run_steps, time.monotonic()

    def record_end(steps, folder, end):
        ends.append(end)
        return run_group(steps, folder, end)

    monkeypatch.setattr(on_device, "run_steps", record_end)
    assert execute("--part=speed", f"--folder={tmp_path}") == int(fails)
    assert not (tmp_path / "arrays.tar.gz").exists()  # of the other part
    left = on_device.LIMITS["speed"] - on_device.RESERVE
    assert len({*ends}) == 1 and left <= ends[0] - begun < left + 40


def make_run(folder, value=1.0, is_complete=True):
    """Writes a run folder of one array, and a file that is not packed."""
    folder.mkdir(parents=True)
    np.savez(folder / "arrays.npz", a=np.array([value, 2.0]))
    (folder / "results.csv").write_text(f"a\n{value}\n")
    (folder / "log.txt").write_text("log")
    if is_complete:
        (folder / "summary.json").write_text("{}")


def test_complete_runs_of_a_device_are_compared_with_those_of_a_cpu(tmp_path):
    device, cpu = tmp_path / "device", tmp_path / "cpu"
    make_run(device / "quick" / "run_b" / "part", 1.5)
    make_run(device / "quick" / "run_a")
    make_run(device / "quick" / "run_c", is_complete=False)
    make_run(device / "quick" / "run_d")
    for name in ("run_a", "run_b/part", "run_c"):
        make_run(cpu / name)
    make_run(cpu / "run_d", is_complete=False)
    on_device.pack_arrays(device, tmp_path / "arrays.tar.gz")
    first, second = on_device.compare_arrays(tmp_path / "arrays.tar.gz", cpu)
    assert (first.run, second.run) == ("run_a", "run_b/part")
    assert (first.arrays, first.equal) == (2, 2) and second.equal == 0
    for name, folder in (("none.gz", cpu), ("arrays.tar.gz", tmp_path / "nowhere")):
        message, archive = "the comparison needs this folder", tmp_path / name
        is_refused(message, on_device.compare_arrays, archive, folder)


def test_the_driver_is_that_of_nvidia_or_none(monkeypatch):
    monkeypatch.setattr(on_device.shutil, "which", lambda program: None)
    assert on_device.read_driver() is None
    monkeypatch.setattr(on_device.shutil, "which", lambda program: f"/bin/{program}")
    calls = []

    def answer(output):
        def run(command, **options):
            calls.append(command)
            return subprocess.CompletedProcess(command, 0, stdout=output)

        return run

    monkeypatch.setattr(on_device.subprocess, "run", answer("H200, 580.1\n"))
    assert on_device.read_driver() == "H200, 580.1"
    assert calls[0][0] == "/bin/nvidia-smi" and "--query-gpu=name,driver_version" in calls[0]
    monkeypatch.setattr(on_device.subprocess, "run", answer(" \n"))
    assert on_device.read_driver() is None
