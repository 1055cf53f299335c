"""--distributed: two local processes give the results of one, and no failure leaves one waiting."""

import json
import os
import re
import signal
import socket

import interrupted_sort
import pytest
from trained_runs import finished, same_arrays
from two_processes import python, run_both

from experiments import run_collapse, run_sort
from experiments.shell import cli, several

COLLAPSE = (
    "--depth=2",
    "--num_heads=2",
    "--d_model=8",
    "--num_tokens=5",
    "--num_seeds=3",
    "--variants=san,san_skip",
    "--seed_chunk=2",
    "--skip_gain=1,0.5",
)
TOGETHER = ("--distributed", "--num_devices=1")


def same_results(folder, expected, *files):
    """Bit for bit: a device computes the same program, whichever process it belongs to."""
    same_arrays(folder, expected)
    for name in ("results.csv", *files):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def both_succeed(module, *arguments):
    """Runs the command in two processes; standard output of the primary."""
    (code, out, err), (other, silent, err_of_other) = run_both("-m", module, *arguments, *TOGETHER)
    assert (code, other) == (0, 0), err[-2000:] + err_of_other[-2000:]
    # Gloo's own line is the only one.
    assert [line for line in silent.splitlines() if "Gloo" not in line] == []
    return out


@pytest.mark.slow
def test_collapse(tmp_path):
    arguments = [*COLLAPSE, f"--output_dir={tmp_path / 'one'}"]
    assert cli.execute(run_collapse.main, run_collapse.FLAGS, arguments) == 0
    folder = tmp_path / "two"
    out = both_succeed("experiments.run_collapse", *COLLAPSE, f"--output_dir={folder}")
    assert f"written to {folder}" in out
    same_results(folder, tmp_path / "one")
    # Another config: the primary refuses the folder, and the other process hears of it.
    refused = [f"--output_dir={folder}", *COLLAPSE, "--depth=3", *TOGETHER]
    for code, _, err in run_both("-m", "experiments.run_collapse", *refused):
        assert code == 2 and "depth is 2 there, 3 here" in err and "Traceback" not in err


whole = finished(run_sort, *interrupted_sort.SMALL)


def ran(where, *command):
    """[(exit code, printed, errors)] of one process that sees so many devices, or of two."""
    if where == "two processes":
        return run_both(*command, *TOGETHER)
    devices = f"--xla_force_host_platform_device_count={where}"
    done = python(*command, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {devices}")
    return [(done.returncode, done.stdout, done.stderr)]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), ("two processes",) * 2])
def test_interrupted_here_and_resumed_there(before, after, whole, tmp_path):
    """Bit for bit as if left alone."""
    arguments = [*interrupted_sort.SMALL, f"--output_dir={tmp_path}"]
    for code, _, err in ran(before, "tests/interrupted_sort.py", *arguments):
        assert code == 130, err[-2000:]
    assert [path.name for path in tmp_path.glob("checkpoints/*/*")] == ["2.npz"]
    environment = json.loads((tmp_path / "config.json").read_text())["environment"]
    assert environment["num_devices"] == (before if before == 1 else 2)
    for code, _, err in ran(after, "-m", "experiments.run_sort", *arguments):
        assert code == 0, err[-2000:]
    assert "resumed after epoch 2" in (tmp_path / "log.txt").read_text()
    same_results(tmp_path, whole, "models.safetensors")


FAILING = """
import os, subprocess, sys
from experiments.shell import cli, several, signals
from rank_collapse.runs import processes
FLAGS = cli.make_flags("x", num_seeds=1)
cli.definer(FLAGS)("boolean", "keep_models", False, "Of execution.")
several.LIMIT = int(os.environ.get("LIMIT", several.LIMIT))
several.SILENT = int(os.environ.get("SILENT", several.SILENT))
if os.environ.get("HOW") == "other flags" and os.environ["JAX_PROCESS_ID"] == "1":
    sys.argv.append("--keep_models")
def main(options):
    with cli.open_run(options):
        if (processes.is_primary()) == (os.environ["WHO"] == "primary"):
            if os.environ["HOW"] == "killed":
                os._exit(9)
            if os.environ["HOW"] == "terminated":
                os.kill(os.getpid(), 15)
                signals.check()
            if os.environ["HOW"] == "stopped":
                later = f"sleep 25; kill -9 {os.getpid()}"
                subprocess.Popen(later, shell=True, stdout=-3, stderr=-3)
                os.kill(os.getpid(), 19)
            if os.environ["HOW"] == "a mistake":
                raise ValueError("mine")
            1 / 0
        processes.same_everywhere("after")
cli.run(main, FLAGS)
"""


@pytest.mark.parametrize(
    ("who", "how", "expected"),
    [
        pytest.param("primary", "killed", 9, marks=pytest.mark.slow),
        pytest.param("other", "a mistake", 2, marks=pytest.mark.slow),
        pytest.param("other", "a bug", 1, marks=pytest.mark.slow),
        ("other", "terminated", 143),  # JAX has a handler of its own, under which it went on
    ],
)
def test_a_process_does_not_wait_for_one_that_has_stopped(who, how, expected, tmp_path):
    found = run_both("-c", FAILING, "--distributed", f"--output_dir={tmp_path}", WHO=who, HOW=how)
    left, waiting = found if who == "primary" else found[::-1]
    assert left[0] == expected
    if waiting[0] != -signal.SIGABRT or how != "killed":  # JAX may see first that process 0 is gone
        assert waiting[0] == 1 and "another process of this run has stopped" in waiting[2]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["primary", pytest.param("other", marks=pytest.mark.slow)])
def test_a_process_that_stands_still_is_not_waited_for(who, tmp_path):
    """JAX ends the others after 50 seconds, here 8: by SIGABRT, in words of its own."""
    arguments = ("-c", FAILING, "--distributed", f"--output_dir={tmp_path}")
    found = run_both(*arguments, WHO=who, HOW="stopped", SILENT="8")
    left, waiting = found if who == "primary" else found[::-1]
    assert left[0] == -signal.SIGKILL and waiting[0] == -signal.SIGABRT
    assert "indicates that another task died" in waiting[2]


@pytest.mark.slow
def test_processes_whose_flags_differ_are_refused_by_name(tmp_path):
    found = run_both("-c", FAILING, "--distributed", f"--output_dir={tmp_path}", HOW="other flags")
    for code, _, err in found:
        assert code == 2 and "error: --distributed: the processes differ in --keep_models" in err


@pytest.mark.slow
@pytest.mark.parametrize("index", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_processes_that_do_not_come_are_not_waited_for(index):
    """Neither a peer nor the coordinator; after 50 seconds, here 4."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    done = mistaken(["-c", FAILING], (address, "2", index), LIMIT="4")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"not all processes came to {address} within 4 s" in done.stderr


def test_a_port_that_another_has_is_one_line(monkeypatch, capfd):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        error = refused([], (address, "2", "0"), monkeypatch, capfd)
    assert "in use" in error


def mistaken(command, variables, **others):
    named = dict(zip(several.VARIABLES, variables, strict=True))
    return python(*command, "--distributed", **named, **others)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        # A bad flag is seen before anything is waited for.
        (["--depth=none"], ("127.0.0.1:1", "2", "1"), "'none'"),
        ([], ("127.0.0.1:1", "two", "0"), "JAX_NUM_PROCESSES='two' is not a whole number"),
        ([], ("127.0.0.1:1", "2", "2"), "JAX_PROCESS_ID=2 is not below JAX_NUM_PROCESSES=2"),
        ([], ("127.0.0.1:1", "٢", "0"), "JAX_NUM_PROCESSES='٢' is not a whole number"),
        ([], ("127.0.0.1", "2", "1"), "JAX_COORDINATOR_ADDRESS='127.0.0.1' is not host:port"),
        ([], ("nowhere.invalid:1", "2", "1"), "ADDRESS='nowhere.invalid:1': no such host"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(arguments, variables, message, monkeypatch, capfd):
    assert message in refused(arguments, variables, monkeypatch, capfd)


def refused(arguments, variables, monkeypatch, capfd):
    """What a run in this process writes, whose mistake is seen before JAX is asked to join."""
    for name, value in zip(several.VARIABLES, variables, strict=True):
        monkeypatch.setenv(name, value)
    assert cli.execute(run_sort.main, run_sort.FLAGS, ["--distributed", *arguments]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("given", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_variables_that_are_not_set_are_named(given):
    """As JAX finds out, and only in a process where it has not started."""
    variables = ("127.0.0.1:1", "", "") if given else ("", "", "")
    done = mistaken(["-m", "experiments.run_sort"], variables)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert re.search("Not set, .*: " + ", ".join(several.VARIABLES[given:]), done.stderr)
