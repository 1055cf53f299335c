"""Theorems of 2022 to 2026 about collapse, evaluated through the toolkit's own networks.

Each theorem is one line with its formula and conditions. Its networks have the weights that it
asks for, `rc.apply` passes them, and what is measured stands beside what is predicted. The outcome
follows from these numbers: the theorem holds as stated; holds, with a bound loose by a factor;
holds under more than is stated; or fails as worded, with the first point against it.

    python -m experiments.run_theorems
    python -m experiments.run_theorems --theorems=equiangular,width

One core of a CPU: two minutes. Expect one failure: layer normalisation does not keep affine rank.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.lab import (
    Experiment,
    Flags,
    Progress,
    RunFolder,
    Shown,
    check_names,
    cli,
    open_run,
    vocabulary,
)
from experiments.theorems import causal, collapse, layers, sphere
from experiments.theorems.statements import (
    LOOSE,
    Curve,
    Theorem,
    judge,
    load_curves,
    save_curves,
)
from experiments.verdicts import Comparison
from rank_collapse.report import figures

THEOREMS = {
    theorem.name: theorem
    for subject in (sphere, causal, collapse, layers)
    for theorem in subject.THEOREMS
}

LONG = ("path_products", "heads", "depth_gains", "noise")  # each compiles several programs

FLAGS = cli.make_flags("theorems", shows="measured,x=last")
vocabulary.define(FLAGS, seed=0)
FLAGS.define("list", "theorems", [*THEOREMS], "Which theorems: " + ", ".join(THEOREMS) + ".")

Results = Mapping[str, list[Curve]]  # {theorem: its curves}


def select_theorems(options: Flags) -> dict[str, Theorem]:
    """Selects the theorems of the flags.

    Raises:
        ValueError: A theorem that there is not.
    """
    check_names(options, "theorems", [*THEOREMS])
    return {name: THEOREMS[name] for name in THEOREMS if name in options.theorems}


def measure(options: Flags, theorems: dict[str, Theorem], run: RunFolder) -> Results:
    """Measures the curves of all theorems in float64, theorem by theorem.

    Args:
        options: The flags.
        theorems: By name.
        run: The run folder; what it has is not computed again.
    """
    results = {}
    progress = Progress(len(theorems), "theorems", log=run.log)
    with jax.enable_x64(True), progress:
        for name, theorem in theorems.items():

            def compute(theorem=theorem):
                return save_curves(theorem.curves(options.seed))

            results[name] = load_curves(run.cached(name, compute))
            progress.advance()
    return results


def make_rows(results: Results, theorems: dict[str, Theorem]) -> Iterator[dict[str, Any]]:
    """Makes a row for each point of each curve."""
    for name, curves in results.items():
        for curve in curves:
            for x, predicted, measured in curve.as_array():
                yield {
                    "theorem": name,
                    "curve": curve.name,
                    "x": x,
                    "predicted": None if np.isnan(predicted) else predicted,
                    "relation": "" if curve.relation == "none" else curve.relation,
                    "measured": measured,
                    "outcome": judge(curves).verdict,
                }


def compare_results(results: Results, theorems: dict[str, Theorem]) -> Iterator[Comparison]:
    """Compares the point of each curve that is farthest from its prediction, and names outcomes."""
    for name, curves in results.items():
        outcome = judge(curves)
        note = f"{outcome.verdict} {outcome.factor:.3g}" if outcome.verdict == LOOSE else ""
        note = note or ": ".join(filter(None, (outcome.verdict, outcome.failed)))
        yield Comparison(f"{name}: outcome", outcome.verdict, None, note)
        for curve in curves:
            x, predicted, measured = curve.as_array()[find_shown(curve)]
            claim = None if np.isnan(predicted) else predicted
            where = f"at {x:.4g} of {theorems[name].axes[0]}, relation {curve.relation}"
            yield Comparison(f"{name}, {curve.name}", measured, claim, where, source="theorem")


def find_shown(curve: Curve) -> int:
    """Finds the point of a curve that is farthest from its prediction; the last of one without."""
    _, predicted, measured = curve.as_array().T
    if np.isnan(predicted).all() or curve.relation == "none":
        return len(measured) - 1
    signs = {"=": np.abs, "≤": lambda a: a, "≥": lambda a: -a}[curve.relation]
    scale = np.where(predicted == 0, 1, np.abs(predicted))
    return int(np.nanargmax(signs((measured - predicted) / scale)))


def plot_theorem(name: str, results: Results):
    """Plots measured points of a theorem and its prediction as lines; None where it was not asked.

    Args:
        name: Of the theorem.
        results: From `measure`.
    """
    if name not in results:
        return None
    theorem = THEOREMS[name]
    fig, ((ax,),) = figures.figure(1, 1)
    for index, curve in enumerate(results[name]):
        x, predicted, measured = curve.as_array().T
        color = figures.color(index)
        ax.plot(x, measured, "o", color=color, markersize=4, label=curve.name)
        if len(x) > 1:
            ax.plot(x, predicted, "-" if curve.relation == "=" else "--", color=color, lw=1)
        else:
            ax.plot(x, predicted, "_", color=color, markersize=14)
    for axis in theorem.log:
        getattr(ax, f"set_{axis}scale")("log")
    ax.set(xlabel=theorem.axes[0], ylabel=theorem.axes[1])
    # Below the axes, where no curve is.
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    return fig


def make_figure(theorem: Theorem) -> Callable[[Results, Any], Any]:
    """Makes the figure function of a theorem, whose caption is its statement."""

    def draw(results: Results, theorems: Any):
        return plot_theorem(theorem.name, results)

    draw.__doc__ = (
        f"{theorem.source}: {theorem.statement} Dots are measured; lines are predicted, dashed "
        "where they bound."
    )
    return draw


EXPERIMENT = Experiment(
    order=900,
    title="Theorems of later papers",
    brief="statements of papers from 2022 to 2026 about collapse, predicted beside measured",
    claim="Later papers prove how tokens cluster on the sphere, park under a causal mask, collapse "
    "in width, and what masks, tied weights, norms, heads and gains do to them (2312.10794, "
    "2410.23228, 2411.04990, 2410.07799, 2406.04267, 2405.18781, 2401.04301, 2604.23681).",
    presets={
        "quick": "--theorems=" + ",".join(t for t in THEOREMS if t not in LONG),
        "reported": "--seed=3000",
        "tiny": "--theorems=masks,affine_rank,lipschitz",
    },
)
FIGURES = {name: make_figure(theorem) for name, theorem in THEOREMS.items()}


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, select_theorems) as run:
        points = run.measure(measure)
        return run.publish(points, table=make_rows, figures=FIGURES, compare=compare_results)


if __name__ == "__main__":
    cli.run(main, FLAGS)
