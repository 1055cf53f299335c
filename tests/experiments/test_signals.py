"""A run that is asked to end: it does, what is finished is saved, its children end too."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from two_processes import PATH, python

from experiments.shell import cli, signals
from experiments.shell.process import ENDED, run_in_workers
from experiments.shell.progress import Progress

FLAGS = cli.make_flags("example")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("place", ["a chunk", "the last chunk", "main"])
def test_the_first_signal_is_read_where_a_chunk_ends(place, number, capfd):
    """Anything else goes on, also a call of JAX, whose compiler an exception would free."""
    before, order = signal.getsignal(number), []

    def traced(x):
        signal.raise_signal(number)
        order.append("traced")
        return x

    def main(_):
        jax.jit(traced)(1.0)
        if place != "main":
            with Progress(2, "train") as progress:
                if place == "a chunk":
                    progress.update(1)
                    pytest.fail("went on")
            pytest.fail("went on")
        order.append("main")

    assert cli.execute(main, FLAGS, []) == CODES[number]
    assert order == ["traced"] + ["main"] * (place == "main")
    said = "\nstopping after this chunk; again to stop at once\n"
    lines = capfd.readouterr().err.splitlines(keepends=True)
    # jaxlib 0.10.0 logs that it reads a kept program.
    err = "".join(line for line in lines if "cpu_aot_loader" not in line)
    assert err.endswith(said + "\ninterrupted: the same command again resumes\n")
    assert signal.getsignal(number) is before and not signals.asked()


# Two within a second are one that was passed on.
SECOND = """
import signal, time
from experiments.shell import signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with signals.stopping():
    signal.raise_signal(signal.SIGHUP)
    assert not signals.asked()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(1.5)
    print('once', flush=True)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""
# To save a chunk.
READ = """
import signal, time
from experiments.shell import signals
signals.GRACE = 0.5
with signals.stopping():
    signal.raise_signal(signal.SIGTERM)
    assert signals.asked()
    time.sleep(1.5)
    print('saved', flush=True)
    signals.check()
"""


@pytest.mark.parametrize(("code", "printed"), [(SECOND, "once\n"), (READ, "saved\n")])
def test_the_second_signal_ends_at_once_and_what_was_read_has_the_time_it_needs(code, printed):
    """An ignored one stays ignored."""
    found = python("-c", code)
    assert (found.returncode, found.stdout) == (143, printed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_where_no_chunk_ends_only_ctrl_c_waits(number):
    """SIGTERM during a compilation under --distributed took 18 to 51 s; Slurm kills after 30."""
    code = (
        "import time\n"
        "from experiments.shell import signals\n"
        "signals.GRACE = 1.0\n"
        "with signals.stopping():\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(4)\n"
        "    print('went on', flush=True)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    waits = number == signal.SIGINT
    assert (out, run.returncode) == (("went on\n", 0) if waits else ("", CODES[number]))
    assert err.count("no chunk ended: stopping now") == (not waits)


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


def test_a_worker_ends_with_a_parent_that_is_killed(monkeypatch):
    with parent_of_workers(monkeypatch, GRACE.format(60), at_once=1) as parent:
        parent.stderr.readline()  # the name
        number = int(parent.stderr.readline())
        parent.kill()
    wait_for_the_end_of(number)


def test_a_signal_ends_the_workers_too(monkeypatch):
    with parent_of_workers(monkeypatch, CHUNKS, at_once=2) as parent:
        lines = [parent.stderr.readline() for _ in range(4)]
        started = [int(line.split(": ")[1]) for line in lines if ": " in line]
        assert len(started) == 2 and lines[:2] == ["[1/3] a\n", "[2/3] b\n"]
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(timeout=60) == 143
        assert parent.stdout.read() == ""  # the third was not begun, none ended by itself
    for worker in started:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


IMPORTS = "import os, time; from experiments.shell import signals\n"
NUMBER = "print(os.getpid(), flush=True)\n"
GRACE = IMPORTS + "signals.GRACE = 1.0\n" + NUMBER + "time.sleep({})"
CHUNKS = IMPORTS + NUMBER + "while True: signals.check(); time.sleep(0.1)"


def parent_of_workers(monkeypatch, code, at_once):
    """A process that runs the code three times in workers."""
    monkeypatch.setenv("PYTHONPATH", PATH)
    commands = {name: ["any_code", f"--code={code}"] for name in "abc"}
    code = "from experiments.shell.process import run_in_workers; "
    code += f"run_in_workers({commands!r}, [{{}}] * {at_once}, print)"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_an_error_ends_the_workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)
    commands = {"a": ["any_code", f"--code={CHUNKS}"], "b": ["any_code"]}
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run_in_workers(commands, [{}] * 2, lambda *_: 1 / 0)
    assert time.monotonic() - begun < 60


def test_workers_go_on_where_one_crashes(tmp_path, monkeypatch, capfd):
    """The first two wait for each other: one alone would wait for ever. What prints a worker's
    own line of an end does not end."""
    monkeypatch.setenv("PYTHONPATH", PATH)
    meet = "import os, sys, time, pathlib; pathlib.Path('{0}').touch(); print('{0}')\n"
    meet += "while not os.path.exists('{1}'): time.sleep(0.01)\n"
    pair = [str(tmp_path / name) for name in "ab"]
    codes = {
        "first": meet.format(*pair) + f"print({ENDED + '0 0'!r})\ncode = 3",
        "second": meet.format(*pair[::-1]) + "os.kill(os.getpid(), 9)",
        "third": "print('x', end='', flush=True); 1 / 0",
        "fourth": "import os; print('there', flush=True); os._exit(7)",
        "fifth": "print('y')",
    }
    found, commands = {}, {name: ["any_code", f"--code={code}"] for name, code in codes.items()}
    run_in_workers(commands, [{}] * 2, lambda name, how: found.update({name: how}))
    assert {name: how.code for name, how in found.items()} == {
        "first": 3,
        "second": -9,
        "third": 1,
        "fourth": 7,
        "fifth": 0,
    }
    assert found["second"].printed == f"{pair[1]}\n" and found["fourth"].printed == "there\n"
    assert "ZeroDivisionError" in found["third"].printed and found["fifth"].printed == "y\n"
    assert all(how.seconds > 0 for how in found.values())
    err = capfd.readouterr().err
    assert f"    first: {pair[0]}\n" in err and f"    second: {pair[1]}\n" in err
    assert err.startswith("[1/5] first\n[2/5] second\n") and "[5/5] fifth\n" in err


def wait_for_the_end_of(number):
    """Of a process that is not a child of this one."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return  # it has ended; nobody has asked for its exit code
        time.sleep(0.05)
    os.kill(number, signal.SIGKILL)
    pytest.fail(f"process {number} goes on")


def test_the_second_signal_ends_a_computation_that_never_returns_to_python():
    code = (
        "import jax\n"
        "from experiments.shell import signals\n"
        "forever = lambda i: jax.lax.while_loop(lambda i: i >= 0, lambda i: (i + 1) % 9, i)\n"
        "compiled = jax.jit(forever).lower(0).compile()\n"
        "with signals.stopping():\n"
        "    print('ready', flush=True)\n"
        "    jax.block_until_ready(compiled(0))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout.readline() == "ready\n"
            for _ in range(2):
                time.sleep(1.5)
                assert run.poll() is None  # the first does not
                run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=60) == 143
        finally:
            run.kill()
