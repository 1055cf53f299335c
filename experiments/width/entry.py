"""How run_width stands in the report."""

from typing import Any

from experiments.shell.entry import Entry
from experiments.shell.paper import said
from experiments.width.results import by_depth
from rank_collapse.report.claims import BELOW_ZERO, Claim, test_mean
from rank_collapse.report.page import Comparison


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """Accuracy by depth; no number is published."""
    return [
        Comparison(
            f"token accuracy at depth {case['depth']}, width {case['hidden_dim']}",
            case["accuracy"],
            note=f"± {case['accuracy_std']:.3f} over {case['seeds']} seeds; "
            f"{case['parameters']} parameters",
        )
        for case in by_depth(summary)
    ]


def claims(summary: dict[str, Any]) -> list[Claim]:
    """The deepest network against the shallowest, on the same data seed by seed."""
    cases = by_depth(summary)
    shallow, deep = cases[0]["accuracy_by_seed"], cases[-1]["accuracy_by_seed"]
    return [
        test_mean(
            [deep[seed] - shallow[seed] for seed in deep if seed in shallow], BELOW_ZERO,
            statistic=f"token accuracy at depth {cases[-1]['depth']} less that at depth "
            f"{cases[0]['depth']}", null="above 0: depth helps", **said("width", "sorting"),
        )
    ]  # fmt: skip


def reading(summary: dict[str, Any]) -> str:
    """One sentence on depth against width."""
    cases = by_depth(summary)
    best, worst = (choose(cases, key=lambda c: c["accuracy"]) for choose in (max, min))
    return (
        f"At about {cases[0]['parameters']} parameters depth {best['depth']} gets most letters "
        f"right ({best['accuracy']:.3f}) and depth {worst['depth']} fewest "
        f"({worst['accuracy']:.3f})."
    )


ENTRY = Entry(
    title="Width against depth",
    claim="The published code (`test_width`) sets a shallow, wide network beside a deep, narrow "
    "one of about as many parameters, on sorting; it gives no number. If short paths carry a "
    "trained network, as section 4.2 says, depth should buy little at equal parameters.",
    presets={
        "quick": (
            "--depths=1",
            "--depths=3",
            "--num_seeds=4",
            "--n_epochs=15",
            "--n_eval_data=100",
        ),
        "paper": ("--num_seeds=5",),
    },
    claims=claims,
    compare=compare,
    reading=reading,
    captions={
        "width": "Left: training loss, mean and standard deviation over seeds. Right: accuracy "
        "against depth, the width chosen so that the number of parameters stays."
    },
)
