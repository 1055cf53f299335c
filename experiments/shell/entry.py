"""How an experiment takes part in `experiments.reproduce`: its module's `ENTRY`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rank_collapse.report.claims import Row
from rank_collapse.report.page import Comparison


@dataclass(frozen=True)
class Entry:
    """One experiment of the report.

    Attributes:
        title: Heading of its section.
        claim: What the paper says, in a sentence or two, with the figure or table it stands in.
        presets: Arguments of the binary by preset: "quick" (seconds on two cores) and "paper".
        claims: Rows of the statements of `experiments.shell.statements`, from the run's summary,
            which the binary gave to `RunFolder.publish`.
        compare: Measured beside published values, without verdicts, from the same summary.
        reading: What the numbers say against the paper, in a sentence, from the same summary.
        captions: Caption by figure name, in the order of the report; a figure not named here
            is not shown, one that is not there is an error of the run.
        order, brief: As of `experiment.Experiment`.
    """

    title: str
    claim: str
    presets: Mapping[str, Sequence[str]]
    reading: Callable[[dict[str, Any]], str]
    claims: Callable[[dict[str, Any]], Sequence[Row]] = lambda summary: ()
    compare: Callable[[dict[str, Any]], Sequence[Comparison]] = lambda summary: ()
    captions: Mapping[str, str] = field(default_factory=dict)
    order: int = 1000
    brief: str = ""
