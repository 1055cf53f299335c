"""How run_circle stands in the report."""

from typing import Any

from experiments.circle.results import TOGETHER, span
from experiments.shell.entry import Entry
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Distance at the end of the run, per case, beside the paper's claim."""
    return [
        Comparison(
            f"{name}: distance of the two sequences at the end",
            case["distance_at_end"],
            "falls together" if name.startswith("attention") else "stays apart (or slower)",
            (case["distance_at_end"] < TOGETHER) == name.startswith("attention"),
            f"at the start {case['distance_at_start']:.2g}; step error {case['step_error']:.2g}",
        )
        for name, case in summary["cases"].items()
    ]


def reading(summary: dict[str, Any]) -> str:
    """One sentence against the paper."""
    fallen = [n for n, c in summary["cases"].items() if c["distance_at_end"] < TOGETHER]
    apart = [n for n in summary["cases"] if n not in fallen]
    return (
        f"Fell together: {'; '.join(fallen) or 'none'}. "
        f"Stayed apart: {'; '.join(apart) or 'none'}. "
        f"Steps from a distance of 1e-2 to 1e-6, where seeds fell: without a skip around the "
        f"attention {_range(summary, skip=False)}, with one {_range(summary, skip=True)}. "
        "One step is the cubic rate of the theory."
    )


def _range(summary, skip):
    steps = [
        step
        for name, case in summary["cases"].items()
        if name.startswith("skip") == skip
        for step in case.get("steps_from_1e-2_to_1e-6") or ()
    ]
    return span(steps) if steps else "none fell"


ENTRY = Entry(
    title="Circle: recurrent attention",
    claim="Section 4.3: a one-layer network fed with its own output lets the two walkers fall "
    "together when it is pure attention; a skip or an MLP counteracts that.",
    presets={"quick": ("--compare", "--widths=32"), "paper": ("--compare", "--num_seeds=5")},
    compare=compare,
    reading=reading,
    captions={
        "trajectories": "The two sequences of one seed, fed with their own continuation.",
        "distance": "Distance between the two sequences by step, one line per seed.",
    },
)
