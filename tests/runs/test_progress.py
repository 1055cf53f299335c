"""Progress: lines of a log, one line of a terminal, and the time left without compiling."""

import io

import pytest

from rank_collapse.runs import progress
from rank_collapse.runs.progress import Progress, format_seconds


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_has_a_line_from_time_to_time(clock):
    stream = io.StringIO()
    with Progress(100, "it", stream=stream) as bar:
        for _ in range(4):
            clock[0] += 2
            bar.advance(10, lambda: "loss 0.3")
        bar.say("note")
        clock[0] += 2
        bar.advance(60)
    assert stream.getvalue().splitlines() == [
        "it:  30%, loss 0.3, 6.0 s, 14 s left",
        "it: note",
        "it: 100%, 10 s",
    ]


def test_compiling_and_earlier_steps_do_not_enter_the_time_left(clock):
    stream = io.StringIO()
    bar = Progress(100, "it", stream=stream, interval=1)
    bar.skip(50)
    with bar.time_activity("compiling"):
        clock[0] += 100
    clock[0] += 10
    bar.advance(10)
    assert stream.getvalue().splitlines() == [
        "it: compiling took 1:40",
        "it:  60%, 10 s, 40 s left",
    ]


def test_a_terminal_has_one_line(clock):
    stream = Terminal()
    with Progress(2, "it", stream=stream) as bar:
        clock[0] += 1
        bar.advance(1, lambda: "loss 0.25")
        bar.say("a note")
        clock[0] += 1
        bar.advance(1)
    text = stream.getvalue()
    assert text.startswith("\rit:  50%, loss 0.25, 1.0 s, 1.0 s left\r")
    assert text.endswith("it: a note\n\rit: 100%, 2.0 s\n")


def test_a_shorter_line_covers_the_one_before(clock):
    stream = Terminal()
    with Progress(3, "it", stream=stream) as bar:
        for value in ("loss 0.25", ""):
            clock[0] += 1
            bar.advance(1, lambda value=value: value)
        with bar.time_activity("drawing"):  # of less than a second, not worth a line
            clock[0] += 0.9
    first, second = stream.getvalue().removesuffix("\n").split("\r")[1:]
    assert first == "it:  33%, loss 0.25, 1.0 s, 2.0 s left"
    assert second == "it:  67%, 2.0 s, 1.0 s left".ljust(len(first))


@pytest.mark.parametrize(("kind", "seconds"), [(Terminal, 0.2), (io.StringIO, 5.0)])
def test_a_line_comes_after_a_fifth_of_a_second_in_a_terminal_and_five_elsewhere(
    kind, seconds, clock
):
    stream = kind()
    bar = Progress(9, "it", stream=stream)
    clock[0] += seconds - 0.01
    bar.advance(1)
    assert not stream.getvalue()
    clock[0] += 0.02
    bar.advance(1)
    assert stream.getvalue().strip().startswith("it:  22%, ")


def test_work_of_an_earlier_call_alone_and_no_work_at_all_have_a_line(clock):
    """No speed is known after what was skipped; nothing of nothing is done."""
    stream = io.StringIO()
    bar = Progress(4, "it", stream=stream, interval=1)
    bar.skip(3)
    clock[0] += 2
    bar.advance(0)
    Progress(0, "none", stream=stream).advance(0)
    assert stream.getvalue().splitlines() == ["it:  75%, 2.0 s, 2.0 s left", "none:   0%, 0.0 s"]


def test_lines_go_to_the_standard_error_and_show_no_control_characters(clock, capsys):
    terminal = Terminal()
    for stream in (None, terminal):
        Progress(1, "a\x1b[2J", stream=stream).advance(1, lambda: "b\x07")
    line = "a\\x1b[2J: 100%, b\\x07, 0.0 s"
    output, errors = capsys.readouterr()
    assert (output, errors, terminal.getvalue()) == ("", f"{line}\n", f"\r{line}")


@pytest.mark.parametrize(("seconds", "lines"), [(0.9, []), (1.0, ["it: drawing took 1.0 s"])])
def test_an_activity_of_a_second_has_a_line(seconds, lines, clock):
    stream = io.StringIO()
    with Progress(3, "it", stream=stream).time_activity("drawing"):
        clock[0] += seconds
    assert stream.getvalue().splitlines() == lines


def test_quiet_is_quiet(clock):
    stream = Terminal()
    with Progress(2, "it", stream=stream, quiet=True) as bar:
        clock[0] += 9
        bar.advance(2, lambda: pytest.fail("it describes what nobody sees"))
        bar.say("note")
    assert stream.getvalue() == ""


def test_times_are_short():
    times = [format_seconds(s) for s in (0.04, 9.94, 9.96, 59.9, 61, 3599.6, 7385)]
    assert times == ["0.0 s", "9.9 s", "10 s", "60 s", "1:01", "1:00:00", "2:03:05"]
