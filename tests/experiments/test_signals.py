"""A run that is asked to end: it does, what is finished is saved, its children end too."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import jax
import pytest

from experiments.shell import cli, signals
from experiments.shell.progress import Progress

FLAGS = cli.make_flags("example")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", CODES)
def test_a_signal_ends_a_run_with_its_code_in_one_line(number, capfd):
    def main(_):
        signal.raise_signal(number)
        pytest.fail("went on")

    before = signal.getsignal(number)
    assert cli.execute(main, FLAGS, []) == CODES[number]
    assert capfd.readouterr().err == "\ninterrupted: the same command again resumes\n"
    assert signal.getsignal(number) is before and not signals.asked()


@pytest.mark.parametrize("place", ["progress", "end of progress", "end of main"])
def test_a_signal_within_a_callback_of_the_collector_is_not_lost(place, capfd):
    """JAX has one: Python prints and ignores what is raised in it."""

    def _xla_gc_callback(phase, info):
        if phase == "start" and not signals.asked():
            signal.raise_signal(signal.SIGINT)

    reached = []

    def main(_):
        gc.callbacks.append(_xla_gc_callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(_xla_gc_callback)
        if place == "end of main":
            return
        with Progress(2, "train") as progress:
            if place == "progress":
                progress.update(1)
                reached.append(1)
        reached.append(2)

    assert cli.execute(main, FLAGS, []) == 130
    assert not reached
    err = capfd.readouterr().err
    assert "interrupted" in err and "Traceback" not in err and "ignored" not in err


@pytest.mark.parametrize("number", CODES)
def test_a_signal_within_the_callback_of_a_weak_reference_is_raised_behind_it(number, capfd):
    """Python prints that it is ignored and goes on: a run ended 7 to 12 seconds later."""

    class Referred:
        pass

    def main(_):
        referred = Referred()
        reference = weakref.ref(referred, lambda _: signal.raise_signal(number))
        del referred
        pytest.fail(f"went on with {reference}")

    assert cli.execute(main, FLAGS, []) == CODES[number]
    assert capfd.readouterr().err == "\ninterrupted: the same command again resumes\n"
    assert sys.gettrace() is None and sys.unraisablehook is not signals._ignored


@pytest.mark.parametrize("number", CODES)
def test_a_signal_within_jax_raises_when_the_call_of_it_is_done(number, capfd):
    order = []

    def traced(x):
        signal.raise_signal(number)
        order.append("traced")
        return x + len(order)

    @contextlib.contextmanager
    def block():
        try:
            yield
        finally:
            order.append("left")

    def main(_):
        with block():
            return jax.jit(traced)(1.0)

    assert cli.execute(main, FLAGS, []) == CODES[number]
    assert order == ["traced", "left"] and sys.gettrace() is None
    err = capfd.readouterr().err
    assert "stopping when this step is done; the second time at once" in err
    assert "interrupted" in err and "Traceback" not in err


STRESS = """
import os, random, signal, sys, threading, time
import jax, jax.numpy as jnp
from experiments.shell import signals

jax.config.update("jax_enable_compilation_cache", False)
end, chance, stopped = time.monotonic() + float(sys.argv[1]), random.Random(0), 0

def work(size):
    f = lambda x: jnp.tanh(x @ x.T).sum() + (x ** size).mean()
    for i in range(3):
        jax.jit(jax.vmap(jax.grad(lambda x, i=i: f(x) * (i + size))))(jnp.ones((2, size, size)))

while time.monotonic() < end:
    with signals.stopping():
        sent = threading.Timer(chance.uniform(0, 0.4), os.kill, [os.getpid(), signal.SIGINT])
        try:
            sent.start()  # a busy machine may send it before this returns
            for size in range(2, 12):
                work(size + chance.randrange(100))
            sent.join()
            signals.check()
        except KeyboardInterrupt:
            stopped += 1
        sent.join()
print(stopped)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [10, pytest.param(120, marks=pytest.mark.slow)])
def test_signals_at_any_moment_of_compiling_never_break_it(seconds):
    """A Ctrl-C that raises there frees what jaxlib's thread still compiles: 8 of 11 died."""
    command = [sys.executable, "-c", STRESS, str(seconds)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, (found.returncode, found.stderr[-2000:])
    assert int(found.stdout) >= seconds / 10 and "ignored" not in found.stderr


def test_a_signal_waits_for_the_end_of_a_chunk(capfd):
    done = []

    def main(_):
        with Progress(3, "train") as progress, signals.deferred():
            for chunk in range(3):
                signal.raise_signal(signal.SIGTERM)
                done.append((chunk, signals.asked()))
                progress.advance()

    assert cli.execute(main, FLAGS, []) == 143
    assert done == [(0, True)]
    assert "stopping when this chunk is saved" in capfd.readouterr().err


def test_the_second_signal_ends_at_once_and_an_ignored_one_stays_ignored():
    code = (
        "import signal, sys\n"
        "from experiments.shell import signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with signals.stopping(), signals.deferred():\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
        "    assert not signals.asked()\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('once', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('twice', flush=True)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (143, "once\n")


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
        assert process.wait(timeout=30) == -signal.SIGINT
        assert process.stderr.read() == ""


def test_a_child_ends_with_a_parent_that_is_killed():
    child = (
        "import os, time; from experiments.shell import process, signals\n"
        "process.end_with_parent()\n"
        "print(os.getpid(), flush=True)\n"
        "with signals.stopping(): time.sleep(60)\n"
    )
    code = "import sys; from experiments.shell.process import run_processes; "
    code += f"run_processes({{'a': [sys.executable, '-c', {child!r}]}}, 1, print)"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as parent:
        parent.stderr.readline()  # the name
        number = int(parent.stderr.readline())
        parent.kill()
    wait_for_the_end_of(number)


def wait_for_the_end_of(number):
    """Of a process that is not a child of this one."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        with (
            open(f"/proc/{number}/stat")
            if os.path.exists(f"/proc/{number}/stat")
            else open(os.devnull) as file
        ):
            if file.read().rpartition(")")[2].split()[:1] == ["Z"]:
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
                time.sleep(0.5)
                assert run.poll() is None  # the first does not
                run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=20) == 143
        finally:
            run.kill()
