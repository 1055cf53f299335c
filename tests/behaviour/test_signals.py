"""A run that is asked to end: it does at the next chunk, and what is finished is saved."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from experiments.lab import cli, pool, progress
from experiments.lab.progress import Progress
from tests.support.folders import REPOSITORY
from tests.support.processes import python

pytestmark = pytest.mark.full

FLAGS = cli.make_flags("example")
PATHS = os.environ | {"PYTHONPATH": str(REPOSITORY)}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("place", ["a chunk", "the last chunk"])
def test_the_first_signal_is_read_where_a_chunk_ends(place, number, capfd):
    """Until then all else goes on, also a call of JAX: an exception would free its compiler."""
    handler, order = signal.getsignal(number), []

    def raise_in_trace(x):
        signal.raise_signal(number)
        order.append("traced")
        return x

    def main(_):
        jax.jit(raise_in_trace)(1.0)
        with Progress(2, "train") as bar:
            bar.advance(1 if place == "a chunk" else 2)
        pytest.fail("went on")

    assert cli.execute(main, FLAGS, []) == CODES[number]
    assert order == ["traced"]
    err = capfd.readouterr().err
    assert "\nstopping at the next step; again to stop at once\n" in err
    assert err.endswith("\ninterrupted: the same command again resumes\n")
    assert signal.getsignal(number) is handler and not progress.stop_requested()


def test_a_signal_ends_a_run_whose_terminal_is_gone():
    """A lost connection sends SIGHUP, and makes all printing fail."""
    code = """
import os, signal
from experiments.lab import cli, progress
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
def main(_):
    signal.raise_signal(signal.SIGHUP)
    progress.raise_if_stopped()
cli.run(main, cli.make_flags('x'))
"""
    assert python("-c", code).returncode == 129


def test_the_second_signal_ends_at_once_and_an_ignored_one_stays_ignored():
    code = """
import signal, time
from experiments.lab import progress
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with progress.handle_signals():
    signal.raise_signal(signal.SIGHUP)
    assert not progress.stop_requested()
    signal.raise_signal(signal.SIGINT)
    print('once', flush=True)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""
    completed = python("-c", code)
    assert (completed.returncode, completed.stdout) == (143, "once\n")


def test_a_signal_while_a_binary_is_imported_shows_no_traceback(tmp_path):
    """A `jax` that does nothing but wait stands for the import of the true one."""
    (tmp_path / "jax.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "experiments.run_sort"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT
        assert process.stderr.read() == ""


def test_the_second_signal_ends_a_computation_that_never_returns_to_python():
    code = (
        "import jax\n"
        "from experiments.lab import progress\n"
        "forever = lambda i: jax.lax.while_loop(lambda i: i >= 0, lambda i: (i + 1) % 9, i)\n"
        "compiled = jax.jit(forever).lower(0).compile()\n"
        "with progress.handle_signals():\n"
        "    print('ready', flush=True)\n"
        "    jax.block_until_ready(compiled(0))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout.readline() == "ready\n"
            for _ in range(2):
                time.sleep(0.5)
                assert run.poll() is None  # the first does not
                run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=60) == 143
        finally:
            run.kill()


def test_two_signals_print_what_to_do_and_nothing_else(tmp_path):
    """Python's resource tracker removes the semaphores of the process that ended at once."""
    script = tmp_path / "waiting.py"
    script.write_text("""
import time
from experiments.lab import pool, progress
if __name__ == "__main__":
    with progress.handle_signals(), pool.start_workers(2) as workers:
        futures = [pool.submit_work(workers, time.sleep, 60) for _ in range(2)]
        print("ready", flush=True)
        time.sleep(60)
""")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], env=PATHS, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)  # the tracker closes its pipe when it ends
    assert process.returncode == 130
    assert err == "\nstopping at the next step; again to stop at once\n"


def list_children(pid):
    """Lists the workers that a process has started, without multiprocessing's own processes."""
    numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {n: Path(f"/proc/{n}/cmdline").read_text() for n in numbers}
    return [n for n, command in commands.items() if "spawn_main" in command]


PARALLEL = {
    "points": ["-m", "experiments.run_path_chains", "--skip_gain=0.5,1,2", "--jobs=2"],
    "experiments": [
        "-m",
        "experiments.reproduce",
        "--only=run_path_chains,run_loops",
        "--jobs=2",
    ],
}


@pytest.mark.parametrize("work", PARALLEL)
@pytest.mark.parametrize("delay", [0.0, 1.0, 4.0])
def test_ctrl_c_while_workers_start_or_compile_ends_the_run(work, delay, tmp_path):
    """As a terminal sends it: to all processes at once."""
    command = [sys.executable, *PARALLEL[work], f"--output_dir={tmp_path}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        while not list_children(process.pid):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "a worker process was killed" not in err
    assert err.count("interrupted") == 1
    assert not (tmp_path / "summary.json").exists()


def test_a_worker_that_waits_for_work_is_not_killed(monkeypatch):
    """It held the lock of the queue, and the other waited for that, and the run for the other."""
    with pool.start_workers(2) as workers:
        ready = [pool.submit_work(workers, time.sleep, 1) for _ in range(2)]
        assert [future.result() for future in ready] == [None, None]
        busy = pool.submit_work(workers, time.sleep, 2)
        time.sleep(0.5)
        monkeypatch.setattr(progress, "_signals_received", [signal.SIGINT])
    assert busy.result() is None


def test_a_signal_without_work_is_noted(monkeypatch):
    monkeypatch.setattr(progress, "_signals_received", [])
    monkeypatch.setattr(progress.multiprocessing, "parent_process", lambda: True)
    progress.note_signal(signal.SIGTERM, None)
    with pytest.raises(progress.Stopped), progress.handle_signals(), Progress(2, "train") as bar:
        bar.advance()
    assert not progress.stop_requested()


@pytest.mark.parametrize("delay", [0.5, 3.0])  # after the handler is there, which takes a moment
def test_ctrl_c_ends_the_command_while_it_compiles(delay, tmp_path):
    code = (
        "import sys; from rank_collapse import command; print('ready', flush=True); command.run()"
    )
    page = tmp_path / "a.html"
    command = [sys.executable, "-c", code, "check", "random:bert-base-cased", f"--out={page}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err
