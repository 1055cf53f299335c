"""How far a command is: one line on a terminal, now and then a line elsewhere, names escaped."""

import sys
from types import SimpleNamespace

import pytest

from rank_collapse.command.progress import (
    PASSES,
    PAUSE,
    StepReporter,
    report_layers,
    report_words,
)
from rank_collapse.pretrained.weights import Table, Unembedding


def test_elsewhere_a_line_comes_after_a_pause(capsys):
    times = [0.0]
    reporter = StepReporter(lambda: times[0])
    for times[0], text in ((1.0, "a"), (PAUSE, "b"), (PAUSE + 1, "c"), (2 * PAUSE + 1, "d")):
        reporter.show(text)
    assert capsys.readouterr().err == "b\nd\n"


def test_a_terminal_has_one_line_that_ends_with_the_last_step(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    reporter = StepReporter()
    reporter.show("layer 1 of 2 \x1b[31m")
    reporter.show("layer 2 of 2", is_last=True)
    first, last = capsys.readouterr().err.split("\r")[1:]
    assert first.startswith("\x1b[Klayer 1 of 2 ") and "\x1b[31m" not in first
    assert last == "\x1b[Klayer 2 of 2\n"


def test_words_are_counted_in_each_pass():
    shown = []

    class Reporter:
        def show(self, text, *, is_last):
            shown.append((text, is_last))

    table = Table(lambda first, last: list(range(first, last)), (5, 2))
    head = report_words(Unembedding(table), Reporter())
    for _ in range(PASSES):
        for first, last in ((0, 3), (3, 5)):
            assert head.table.read(first, last) == list(range(first, last))
    assert shown[0] == (f"words 3 of 5, pass 1 of {PASSES}", False)
    assert shown[-1] == (f"words 5 of 5, pass {PASSES} of {PASSES}", True)
    assert [is_last for _, is_last in shown].count(True) == 1


@pytest.mark.parametrize("is_random", [False, True])
def test_each_layer_is_reported_after_a_line_about_the_checkpoint(is_random, capsys):
    """Before the first layer the state is that of the embedding."""
    shown = []

    class Reporter:
        def show(self, text, *, is_last):
            shown.append((text, is_last))

    config = SimpleNamespace(depth=3)
    source = SimpleNamespace(config=config, has_random_weights=is_random)
    opened = SimpleNamespace(name="a/b", source=source)
    done = report_layers(opened, SimpleNamespace(counts="2 texts of 4 tokens"), Reporter())
    weights = ", random weights" if is_random else ""
    assert capsys.readouterr().err == f"a/b: 3 layers, 2 texts of 4 tokens{weights}\n"
    for layers in range(4):
        done(SimpleNamespace(layers=layers))
    assert shown == [(f"layer {i} of 3", i == 3) for i in range(4)]
