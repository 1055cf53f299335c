"""The command as a process: its exit codes, interrupts, closed streams and too little memory."""

import os
import signal
import sys
import types

import pytest

from rank_collapse import command


def run_raising(error, monkeypatch):
    """Runs a command whose module raises an exception; returns the exit code."""

    def fail(flags, arguments):
        raise error

    flags = types.SimpleNamespace(module=types.SimpleNamespace(run=fail))
    monkeypatch.setattr(command, "parse_flags", lambda arguments: flags)
    return command.main(["check"])


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ValueError("no\nluck"), 2, "error: no luck\n"),
        (OSError(2, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (MemoryError("too large"), 2, "error: too large\n"),
        (ModuleNotFoundError("no torch"), 2, "error: no torch\n"),
        (RuntimeError("RESOURCE_EXHAUSTED: 3 GB"), 2, "error: out of memory: RESOURCE_EXH"),
        (
            RuntimeError("RESOURCE_EXHAUSTED\n" + 400 * "x"),
            2,
            f"error: out of memory: RESOURCE_EXHAUSTED {280 * 'x'}…\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_mistakes_and_interrupts_are_lines_with_a_code(error, code, printed, monkeypatch, capsys):
    assert run_raising(error, monkeypatch) == code
    assert capsys.readouterr().err.startswith(printed)


def test_another_error_of_jax_is_a_bug(monkeypatch):
    with pytest.raises(RuntimeError, match="INTERNAL"):
        run_raising(RuntimeError("INTERNAL: a bug"), monkeypatch)


def test_a_closed_pipe_has_the_code_of_its_signal(monkeypatch):
    calls = []
    with monkeypatch.context() as context:
        context.setattr(command.os, "open", lambda *arguments: calls.append(arguments) or 77)
        context.setattr(command.os, "dup2", lambda *files: calls.append(files))
        context.setattr(sys, "stdout", types.SimpleNamespace(fileno=lambda: 101))
        assert run_raising(BrokenPipeError(), monkeypatch) == 141
    assert calls == [(os.devnull, os.O_WRONLY), (77, 101)]


def test_without_standard_output_nothing_is_computed(monkeypatch, capsys):
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", None)
        assert run_raising(AssertionError("ran"), monkeypatch) == 2
    assert capsys.readouterr().err == "error: standard output is closed: nothing can be printed\n"


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_process_prints_what_its_encoding_has_and_ends_at_ctrl_c(is_ignored, monkeypatch):
    """An ignored Ctrl-C, as behind `nohup`, stays ignored."""
    calls = []
    stream = types.SimpleNamespace(reconfigure=lambda **options: calls.append(options))
    handler = signal.SIG_IGN if is_ignored else signal.default_int_handler
    monkeypatch.setattr(command, "show_warnings_in_lines", lambda: calls.append("warnings"))
    monkeypatch.setattr(command, "main", lambda: 7)
    with monkeypatch.context() as context, pytest.raises(SystemExit) as ended:
        context.setattr(sys, "stdout", stream)
        context.setattr(command.signal, "getsignal", lambda number: handler)
        context.setattr(command.signal, "signal", lambda *arguments: calls.append(arguments))
        command.run()
    assert ended.value.code == 7
    handlers = [] if is_ignored else [(signal.SIGINT, command.end_on_interrupt)]
    assert calls == [{"errors": "replace"}, "warnings", *handlers]


def test_ctrl_c_ends_the_process_at_once_with_a_line(monkeypatch):
    written = []
    with monkeypatch.context() as context:
        context.setattr(command.os, "write", lambda *arguments: written.append(arguments))
        context.setattr(command.os, "_exit", written.append)
        command.end_on_interrupt(signal.SIGINT, None)
    assert written == [(2, b"\ninterrupted\n"), 130]
