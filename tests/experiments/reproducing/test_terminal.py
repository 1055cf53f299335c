"""What `reproduce` prints while experiments run."""

import contextlib
import csv
import io
import itertools
import sys
import threading

import pytest

from experiments.lab import progress
from experiments.lab.experiment import list_experiments
from experiments.reproducing import terminal
from experiments.reproducing.sections import PRESETS, list_runs
from experiments.verdicts import Comparison, Section, mean_row


def make_section(**fields):
    return Section("run_sort", "Sorting", "", "python", **fields)


def test_a_line_has_name_time_and_a_number_beside_the_published_one():
    comparisons = [
        Comparison("error", 1e-15, 0, "a note"),
        Comparison("order", 2.9, "falls"),
        Comparison("full model", 0.98, 0.9, "a note"),
        Comparison("best length", 3),
    ]
    line = terminal.describe_ended("3/16", make_section(comparisons=comparisons), 12.4)
    assert line == " 3/16 run_sort                12 s CPU  full model: 0.98 (published 0.9)"
    for count, text in (
        (2, "order: 2.9 (published: falls)"),
        (1, "error: 1e-15 (published 0)"),
    ):
        assert terminal.describe_number(make_section(comparisons=comparisons[:count])) == text
    for published, written in (
        (3, "theory 3"),
        ("1 of 8", "theory 1 of 8"),
        ("fewer", "theory: fewer"),
    ):
        theory = Comparison("order", 3.0, published, source="theory")
        line = terminal.describe_number(make_section(comparisons=[theory]))
        assert line == f"order: 3 ({written})"
    row = mean_row("loops grow", "16 loops", [0.25, 0.35])
    other_rows = mean_row("loops grow", "8 loops", [None]), mean_row("rate", "later", [7.0])
    number = terminal.describe_number(make_section(claims=[other_rows[0], row, other_rows[1]]))
    assert number.endswith(", 16 loops: 0.3")
    assert terminal.describe_number(make_section(claims=other_rows[:1])) == "it has no number"
    line = terminal.describe_number(make_section(comparisons=[comparisons[3], comparisons[0]]))
    assert line == "error: 1e-15 (published 0)"
    assert terminal.describe_number(make_section()) == "it has no number"


def test_a_failed_experiment_says_so_in_its_line():
    section = make_section(error="RunError: exit code 2\nmore", comparisons=[])
    assert terminal.describe_ended("1/2", section, 0.0).endswith("failed: RunError: exit code 2")
    printed = make_section(error="RunError: exit code 2\nerror: first\n  x\nerror: no \x1b disk\ny")
    line = terminal.describe_ended("12/16", printed, 3.6)
    assert line == "12/16 run_sort                 4 s CPU  failed: no \\x1b disk"


def test_the_remaining_time_follows_from_what_has_ended(tmp_path, capsys):
    expected = {"a": 30.0, "b": 60.0, "c": 30.0}
    screen = terminal.Screen(expected, 1, tmp_path)
    assert screen.seconds_left() == pytest.approx(120, abs=1)
    screen.end("a", 90.0)  # three times as slow, of which some is believed at once
    assert screen.seconds_left() == pytest.approx(180, abs=1)
    screen.end("b", 180.0)
    screen.end("c", 0.0)  # of a process that was killed no time is known
    assert screen.seconds_left() == 0
    two = terminal.Screen(expected, 2, tmp_path)
    assert two.seconds_left() == pytest.approx(60, abs=1)
    assert two._list_running() == ["a", "b"]
    long = terminal.Screen({"a": 5.0, "b": 100.0}, 2, tmp_path)
    assert long.seconds_left() == pytest.approx(100, abs=1)  # no job helps the longest run


def test_runs_that_are_read_or_have_no_time_teach_nothing_about_the_others(tmp_path, monkeypatch):
    """Only computed runs enter the slowdown; a running one has what it took already off."""
    clock = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    expected = {"read": terminal.SECONDS_TO_READ, "lost": 40.0, "done": 10.0, "a": 60.0, "b": 20.0}
    with terminal.Screen(expected, 2, tmp_path) as screen:
        for run, seconds in (("read", 50.0), ("lost", 0.0), ("done", 30.0)):
            screen.end(run, seconds)
        slowdown = (terminal.USUAL_SECONDS + 30.0) / (terminal.USUAL_SECONDS + 10.0)
        for elapsed in (0.0, 24.0, 200.0):
            clock[0] = 100.0 + elapsed
            left = [
                max(seconds * slowdown - elapsed, terminal.LEAST_LEFT * elapsed)
                for seconds in (60.0, 20.0)
            ]
            assert screen.seconds_left() == pytest.approx(max(sum(left) / 2, *left))
        assert screen._describe_total() == "3 of 5 runs in 03:20, about 00:40 left"
        assert screen._list_running() == ["a", "b"]


def test_the_times_are_those_of_the_preset(tmp_path, monkeypatch):
    table = tmp_path / "times.csv"
    table.write_text("preset,run,cpu_seconds\nquick,run_sort,2.5\nreported,run_sort,30\n")
    monkeypatch.setattr(terminal, "TIMES", table)
    assert terminal.read_times("quick") == {"run_sort": 2.5}
    assert terminal.read_times("reported") == {"run_sort": 30.0}


def test_what_runs_is_the_last_line_of_its_log(tmp_path):
    assert progress.read_activity(tmp_path) == "starting"
    log = tmp_path / "log.txt"
    log.write_text("2026-11-29 01:02:03 training: 1/5\n2026-11-29 01:02:04 training: \x1b[2J2/5\n")
    assert progress.read_activity(tmp_path) == "training: \\x1b[2J2/5"


def test_lines_are_whole_where_nobody_watches(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal.progress, "SILENCE", 0.0)
    with terminal.Screen(dict.fromkeys(("run_sort", "run_width", "c"), 1.0), 2, tmp_path) as screen:
        screen.say("x" * 300)
        screen._draw()
    printed = capsys.readouterr()
    assert printed.out == "x" * 300 + "\n"
    line = printed.err.splitlines()[0]
    assert line.startswith("  0 of 3 runs in 00:00, about 00:0")
    assert line.endswith("left; run_sort: starting; run_width: starting")


def test_after_a_line_there_is_a_silence_of_its_own(tmp_path, monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    screen = terminal.Screen({"run_sort": 1.0}, 1, tmp_path)
    for seconds, is_drawn in ((0.6, False), (0.8, True), (1.4, False), (1.6, True)):
        clock[0] = seconds * progress.SILENCE
        screen._draw()
        assert bool(capsys.readouterr().err) is is_drawn, seconds
    clock[0] = 2.0 * progress.SILENCE
    screen.say("1/2 run_join")  # which is a line, too
    clock[0] = 2.5 * progress.SILENCE
    screen._draw()
    assert capsys.readouterr() == ("1/2 run_join\n", "")


def test_a_terminal_gets_lines_that_are_redrawn(tmp_path, monkeypatch, capsys):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    with terminal.Screen({"run_sort": 1.0, "run_width": 1.0}, 2, tmp_path) as screen:
        screen._draw()
        screen.say("x" * 300)
    printed = capsys.readouterr()
    assert printed.out == "x" * 59 + "\n"
    assert printed.err.count("\x1b[3A\x1b[J") >= 2  # two runs and the total


def test_the_table_of_times_has_every_run_of_a_preset():
    with terminal.TIMES.open(encoding="utf-8", newline="") as file:
        runs = {(row["preset"], row["run"]) for row in csv.DictReader(file)}
    names = list_experiments()
    assert runs == {(p, run) for p in PRESETS for name in names for run in list_runs(name, p)}


def test_lines_are_drawn_again_while_experiments_run(tmp_path, monkeypatch):
    counts, is_second = itertools.count(1), threading.Event()

    def draw(screen):
        if next(counts) == 2:
            is_second.set()

    monkeypatch.setattr(progress, "SILENCE", 0.04)
    monkeypatch.setattr(terminal.Screen, "_draw", draw)
    with terminal.Screen({"a": 1.0}, 1, tmp_path):
        assert is_second.wait(timeout=20)


def test_a_line_stands_above_the_lines_of_the_running_experiments(tmp_path, monkeypatch):
    """A terminal shows both streams: the old lines are deleted, then the line, then they again."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: 0.0)
    monkeypatch.setenv("COLUMNS", "36")
    screen = terminal.Screen({"run_sort": 1.0, "run_width": 1.0}, 2, tmp_path)
    screen._draw()
    lines = shown.getvalue()
    assert lines.splitlines() == [
        "  run_sort               starting",
        "  run_width              starting",
        "  0 of 2 runs in 00:00, about 00:01 left"[:35],  # else it would take two lines
    ]
    screen.say("1/2 run_join")
    assert shown.getvalue() == f"{lines}\x1b[3A\x1b[J1/2 run_join\n{lines}"
    (tmp_path / "run_sort").mkdir()
    (tmp_path / "run_sort" / "log.txt").write_text("2026-11-29 01:02:03 training: 1 of 50 epochs\n")
    screen._draw()
    last = shown.getvalue().splitlines()[-3].removeprefix("\x1b[3A\x1b[J")
    assert last == "  run_sort               training: 1 of 50"[:35]


def test_a_terminal_is_drawn_often_and_its_lines_go_at_the_end(tmp_path, monkeypatch, capsys):
    """Elsewhere a line comes after a silence."""
    pauses = []

    @contextlib.contextmanager
    def repeat(draw, seconds):
        pauses.append(seconds)
        draw()
        yield

    monkeypatch.setattr(progress, "repeat_until_done", repeat)
    clock = [7.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    for is_terminal in (False, True):
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda value=is_terminal: value)
        with terminal.Screen({"run_sort": 1.0}, 1, tmp_path):
            drawn = capsys.readouterr().err
            assert ("run_sort" in drawn) == is_terminal
        assert capsys.readouterr().err == ("\x1b[2A\x1b[J" if is_terminal else "")
    assert pauses == [progress.SILENCE / 4, progress.REDRAWN]


def test_a_run_begins_when_the_screen_does(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "repeat_until_done", lambda *arguments: contextlib.nullcontext())
    with terminal.Screen({"a": 100.0, "b": 10.0}, 1, tmp_path) as screen:
        clock[0] = 30.0
        assert screen.seconds_left() == 80
        screen.end("a", 0.0)  # of which nothing is learned; the second begins now
        clock[0] = 34.0
        assert screen.seconds_left() == 6
