"""Shows the progress of a command on standard error: one changing line, or a line now and then."""

import sys
import time
from collections.abc import Callable
from typing import Any

from rank_collapse.command.inputs import Inputs, Opened
from rank_collapse.pretrained.published import RANDOM_WEIGHTS
from rank_collapse.pretrained.streaming import State
from rank_collapse.pretrained.weights import Table, Unembedding
from rank_collapse.printed import escape_text, format_count, print_lines

PAUSE = 10.0  # seconds between two lines where there is no terminal
PASSES = 4  # in which a depth report reads the table of words


class StepReporter:
    """Shows one step after another: on a terminal in one line, elsewhere at most once in `PAUSE`.

    Args:
        clock: Seconds that rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._is_terminal = clock, sys.stderr.isatty()
        self._last = clock()

    def show(self, text: str, *, is_last: bool = False) -> None:
        """Show a step.

        Args:
            text: The step.
            is_last: Whether the next text begins a new line.
        """
        if self._is_terminal:
            end = "\n" if is_last else ""
            print(f"\r\x1b[K{escape_text(text)}", end=end, file=sys.stderr, flush=True)
        elif self._clock() - self._last >= PAUSE:
            self._last = self._clock()
            print_lines(text, file=sys.stderr, flush=True)


def report_layers(opened: Opened, inputs: Inputs, reporter: StepReporter) -> Any:
    """Report each group that begins, and return the stream's `done`, which reports layers.

    Args:
        opened: The checkpoint.
        inputs: Tokens or vectors that the checkpoint reads.
        reporter: Reporter that shows the layers.
    """
    depth = opened.source.config.depth
    weights = f", {RANDOM_WEIGHTS}" if opened.source.has_random_weights else ""
    text = f"{opened.name}: {format_count(depth, 'layer')}, {inputs.counts}{weights}"
    print_lines(text, file=sys.stderr, flush=True)

    def report_layer(state: State) -> None:
        is_last = state.layers == depth
        reporter.show(f"layer {state.layers} of {depth}", is_last=is_last)

    return report_layer


def report_words(unembedding: Unembedding, reporter: StepReporter) -> Unembedding:
    """Return a head whose table reports how much of it has been read.

    Args:
        unembedding: A head that has a `Table`.
        reporter: Reporter that shows the words.
    """
    table, count = unembedding.table, 0

    def read(first: int, last: int) -> Any:
        """Read rows of the table, and count a pass for each read of the first row."""
        nonlocal count
        count += first == 0
        text = f"words {last} of {table.shape[0]}, pass {count} of {PASSES}"
        reporter.show(text, is_last=last == table.shape[0] and count == PASSES)
        return table.read(first, last)

    return unembedding._replace(table=Table(read, table.shape))
