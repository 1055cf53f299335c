"""Progress that is true: the clock leaves out what is no step, and nothing is silent for long."""

import ast
import contextlib
import io
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from experiments.lab import progress
from experiments.lab.progress import Progress, report_activity
from tests.support.folders import REPOSITORY


class Terminal(io.StringIO):
    """A stream that a person reads."""

    def isatty(self):
        return True


@pytest.mark.full
def test_compiling_is_not_in_the_remaining_time():
    with Progress(3, "train") as bar:
        with bar.time_activity("compiling"):
            time.sleep(0.4)
        bar.advance()
        assert bar.format_dict["elapsed"] < 0.3
        assert not bar.format_dict["rate"]  # no smoothing, which would know of the compilation


def test_activities_inside_others_count_once():
    with Progress(2, "train") as bar:
        start = bar.start_t
        with bar.time_activity("measuring"), bar.time_activity("compiling"):
            time.sleep(0.2)
        assert 0.2 <= bar.start_t - start < 0.39


@pytest.mark.parametrize("is_activity", [False, True])
def test_a_step_without_end_and_an_activity_say_so(is_activity, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", 0.1)
    logged = []
    with Progress(3, "train", log=logged.append, interval=0.0) as bar:
        bar.advance(1)
        if is_activity:
            with bar.time_activity("compiling"):
                time.sleep(0.4)
        else:
            time.sleep(0.4)
    text = "train: compiling, 00:00" if is_activity else "train: 1/3, 00:00"
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(text) >= 2 and [line for line in logged if line == text]


def test_silence_is_looked_for_several_times_within_its_limit(monkeypatch):
    """Otherwise a line could come after nearly twice the limit."""
    intervals = []

    def repeat(report, seconds):
        intervals.append(seconds)
        return contextlib.nullcontext()

    monkeypatch.setattr(progress, "repeat_until_done", repeat)
    with Progress(2, "train"):
        pass
    assert intervals == [progress.SILENCE / 4]
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(2, "train"):  # a bar is drawn every second
        pass
    assert intervals[1:] == [1.0]


def test_a_bar_that_is_disabled_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SILENCE", 0.02)
    with Progress(0, "train") as bar, bar.time_activity("compiling"):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_what_takes_long_is_said_and_what_is_short_is_not(monkeypatch, capsys):
    with report_activity("drawing figures"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SILENCE", 0.05)
    with report_activity("drawing figures"):
        time.sleep(0.2)
    assert capsys.readouterr().err.startswith("drawing figures, 00:00\n")


@pytest.mark.parametrize("error", [OSError("the terminal is gone"), ValueError("closed file")])
def test_a_report_that_fails_ends_neither_the_computation_nor_the_reports(error):
    reports, is_second = [], threading.Event()

    def report():
        reports.append(len(reports))
        if len(reports) == 2:
            is_second.set()
        raise error

    with progress.repeat_until_done(report, 0.01):
        assert is_second.wait(5)


def test_signals_are_handled_as_before_once_the_work_is_done():
    """The handlers of a library that calls us, and its file descriptor; one inside another too."""

    def note(number, frame):
        """Stands for a handler of somebody else."""

    earlier = {number: signal.signal(number, note) for number in progress.SIGNALS}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    earlier_fd = signal.set_wakeup_fd(writer)
    try:
        for error in (None, ValueError):
            with contextlib.suppress(ValueError), progress.handle_signals():
                inside = {number: signal.getsignal(number) for number in progress.SIGNALS}
                assert note not in inside.values()
                with progress.handle_signals():
                    pass
                assert {n: signal.getsignal(n) for n in progress.SIGNALS} == inside
                if error:
                    raise error
            assert {signal.getsignal(number) for number in progress.SIGNALS} == {note}
            assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def test_plain_progress_is_lines_with_values_and_remaining_time(capsys):
    logged = []
    with Progress(4, "train", log=logged.append, interval=0.0) as progress:
        progress.skip(1)
        progress.advance(1, loss=0.25, share=0.123456)
        with progress.time_activity("compiling"):
            pass
        progress.reach(4)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("train: ") for line in lines)
    assert lines[0].startswith("train: 2/4, loss=0.25, share=0.1235, ")
    assert lines[0].endswith(" left")
    assert "compiling took " in lines[1] and lines[-1].startswith("train: 4/4, ")
    assert {*lines} == {*logged}


def test_a_terminal_gets_a_bar_that_is_redrawn(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    details = []
    with Progress(2, "train", details=lambda: ", ".join(details)) as progress:
        progress.advance(1, loss=1.0)
        progress._report()  # as its thread does
        assert "loss=1" in sys.stderr.getvalue().split("\r")[-1]
        details.append("worker 1: epoch 3")
        progress._report()
        assert "worker 1: epoch 3" in sys.stderr.getvalue().split("\r")[-1]
        progress.advance(1, loss=0.5)
    output = sys.stderr.getvalue()
    assert output.count("\r") > 1 and output.count("\n") == 1 and "loss=0.5" in output
    with Progress(2, "train") as progress:
        progress.say("a remark")
    assert "train: a remark\n" in sys.stderr.getvalue()


def list_reports():
    """Lists (name of the file, code of the log) of what experiments report on the screen."""
    for path in sorted((REPOSITORY / "experiments").rglob("*.py")):
        if "benchmarks" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name, arguments = ast.unparse(node.func).split(".")[-1], node.args
                logs = [word.value for word in node.keywords if word.arg == "log"]
                if name == "report_activity":
                    yield path.name, ast.unparse(arguments[1])
                elif name == "Progress":
                    yield path.name, ast.unparse(logs[0]) if logs else ""


def test_what_experiments_report_is_in_the_log_of_their_run():
    reports = list(list_reports())
    assert len(reports) > 10
    assert [report for report in reports if not report[1].endswith(".log")] == []


@pytest.fixture
def send_signals(monkeypatch):
    """Returns a function that writes signals into a pipe and ends it; it returns the reader."""
    monkeypatch.setattr(progress, "_signals_received", [])
    monkeypatch.setattr(progress, "_signal_read", threading.Event())

    def send(*numbers):
        reader, writer = os.pipe()
        os.write(writer, bytes(numbers))
        os.close(writer)
        return reader

    return send


@pytest.mark.parametrize("parent", [None, object()])
def test_the_reader_of_signals_closes_its_pipe(parent, send_signals, monkeypatch, capfd):
    """It says what happens, unless it is a worker, whose parent does."""
    monkeypatch.setattr(progress.multiprocessing, "parent_process", lambda: parent)
    reader = send_signals(signal.SIGTERM)
    progress._read_signals(reader)
    line = "\nstopping at the next step; again to stop at once\n"
    assert capfd.readouterr().err == ("" if parent else line)
    assert progress._signals_received == [signal.SIGTERM] and progress._signal_read.is_set()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_a_second_signal_kills_the_workers_before_the_process_ends(send_signals, monkeypatch):
    workers, ended = [SimpleNamespace(kill=lambda i=i: ended.append(i)) for i in range(2)], []

    def end(code):
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(progress.multiprocessing, "active_children", lambda: workers)
    monkeypatch.setattr(progress.os, "_exit", end)
    reader = send_signals(signal.SIGINT, signal.SIGTERM)
    with pytest.raises(SystemExit):
        progress._read_signals(reader)
    os.close(reader)
    assert ended == [0, 1, 128 + signal.SIGTERM]


def test_a_signal_that_is_ignored_stays_ignored():
    """As SIGHUP in nohup."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with progress.handle_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_the_first_signal_gives_the_exit_code(monkeypatch):
    monkeypatch.setattr(progress, "_signals_received", [signal.SIGTERM, signal.SIGINT])
    with pytest.raises(progress.Stopped) as stopped:
        progress.raise_if_stopped()
    assert stopped.value.code == 128 + signal.SIGTERM


def test_the_activity_of_a_run_is_the_end_of_its_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"")
    assert progress.read_activity(tmp_path) == "starting"
    lines = [f"2026-11-29 01:02:03 training: {i:04}/2000" for i in range(200)]
    log.write_text("\n".join(lines) + "\n")  # of 8 kB
    assert progress.read_activity(tmp_path) == "training: 0199/2000"


def test_plain_lines_are_far_apart_and_say_the_time_of_the_activity_or_of_the_counting(
    monkeypatch, capsys
):
    """By a clock of the test: none sooner than seven tenths of the silence after another line."""
    clock, logged = [0.0], []
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(progress, "repeat_until_done", lambda *_: contextlib.nullcontext())

    def report_at(*seconds):
        for second in seconds:
            clock[0] = second
            bar._report()

    bar = Progress(3, "train", log=logged.append, interval=1000.0, details=lambda: "worker 1")
    bar.skip(1)
    bar.advance()
    assert bar.n == 2 and bar.format_dict["initial"] == 1  # which does not enter the speed
    report_at(6.9, 7.1, 14.0)
    clock[0] = 15.0
    bar.say("a remark")
    report_at(21.9, 22.1)
    clock[0], begun = 30.0, bar.start_t
    with bar.time_activity("compiling"):
        report_at(38.0)
        clock[0] = 40.0
    assert bar.desc == "train" and bar.start_t == begun + 10
    report_at(46.9, 49.0)
    assert logged == [
        "train: 2/3, 00:07; worker 1",
        "train: a remark",
        "train: 2/3, 00:22; worker 1",
        "train: compiling, 00:08; worker 1",
        "train: compiling took 00:10",
        "train: 2/3, 00:09; worker 1",
    ]
    assert capsys.readouterr().err.splitlines() == logged
    bar.disable = True
    bar.close()


def test_signals_of_an_earlier_command_do_not_stop_the_next_one():
    with progress.handle_signals():
        progress.note_signal(signal.SIGTERM)
        progress._signal_read.set()
        assert progress.stop_requested()
    assert not progress.stop_requested() and not progress._signal_read.is_set()


def test_a_log_that_is_not_there_yet_is_of_a_run_that_starts(tmp_path):
    assert progress.read_activity(tmp_path) == "starting"
