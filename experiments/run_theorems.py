"""Theorems of 2022 to 2026 about collapse, evaluated through the toolkit's own networks.

Each theorem is one line with its formula and conditions. Its networks have the weights that it asks
for, `rc.apply` passes them, and the experiment compares measured and predicted values. The outcome
follows from these numbers: the theorem holds as stated; holds, with a bound loose by a factor;
holds under further conditions; fails as worded, with the first point against it; or is measured
without a claim to judge. Seven statements that could go either way are also measured in --num_seeds
independent draws.

    python -m experiments.run_theorems
    python -m experiments.run_theorems --theorems=equiangular,width
    python -m experiments.run_theorems --seed=3000 --until=decided

One core of a CPU: two minutes. Expect one failure: layer normalisation does not keep affine rank.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from experiments.lab import (
    Executor,
    Experiment,
    Flags,
    Options,
    Progress,
    Run,
    RunFolder,
    check_names,
    cli,
    open_run,
    shared_flags,
)
from experiments.theorems import causal, draws, initial, mixing, one_layer, sphere
from experiments.theorems.drawing import plot_theorem
from experiments.theorems.outcomes import (
    DRAW,
    LOOSE,
    Curve,
    Panel,
    Theorem,
    judge,
    load_curves,
    save_curves,
)
from experiments.verdicts import Comparison, Row, TableRow, make_row

THEOREMS = {
    theorem.name: theorem
    for subject in (sphere, causal, mixing, initial, one_layer)
    for theorem in subject.THEOREMS
}

# {relation of a curve: the claim about its point}
CLAIMED = {
    "=": "; claim: equal",
    "≤": "; claim: at most",
    "≥": "; claim: at least",
    "none": "",
}
# Left out of the quick size: each takes long.
LONG = ("path_products", "heads", "depth_gains", "noise", "parking", "repeated")

FLAGS = cli.make_flags(
    "theorems", num_seeds=2, num_devices=1, can_grow=True, shows="measured,x=last"
)
shared_flags.define(FLAGS, seed_chunk=0)
FLAGS.define("list", "theorems", [*THEOREMS], "Which theorems: " + ", ".join(THEOREMS) + ".")


class Results(NamedTuple):
    """What was measured.

    Attributes:
        curves: {theorem: its curves}.
        draws: {(statement, setting): its statistic by draw [s]}.
    """

    curves: Mapping[str, list[Curve]]
    draws: Mapping[tuple[str, str], np.ndarray]


def select_theorems(options: Options) -> dict[str, Theorem]:
    """Selects the theorems of the flags.

    Raises:
        ValueError: An unknown theorem.
    """
    check_names(options, "theorems", [*THEOREMS])
    return {name: THEOREMS[name] for name in THEOREMS if name in options.theorems}


def measure(options: Options, theorems: dict[str, Theorem], folder: RunFolder) -> Results:
    """Measures the curves of all theorems and the draws of their statements, in float64.

    Args:
        options: The flags.
        theorems: Theorems by name.
        folder: The run folder; results that it already holds are not computed again.
    """
    curves = {}
    with jax.enable_x64(True):
        with Progress(len(theorems), "theorems", log=folder.log) as progress:
            for name, theorem in theorems.items():

                def compute(theorem=theorem):
                    return save_curves(theorem.curves(options.seed))

                curves[name] = load_curves(folder.cached(name, compute))
                progress.advance()
        return Results(curves, measure_draws(options, theorems, folder))


def measure_draws(
    options: Options, theorems: dict[str, Theorem], folder: RunFolder
) -> dict[tuple[str, str], np.ndarray]:
    """Measures the statistics of the registered statements, {(statement, setting): [s]}.

    Args:
        options, theorems, folder: See `measure`.
    """
    programs, values = [*draws.list_draws(theorems)], {}
    total = options.num_seeds * sum(len(settings) for *_, settings, _ in programs)
    with Executor(options, folder, "draws", total) as executor:
        for key, compute, settings, level in programs:

            def measure_one(seed, traced, compute=compute):
                return {"value": compute(seed, **traced)}

            cells = {f"{key}, {setting}": traced for setting, traced in settings.items()}
            measured = executor.measure(measure_one, cells, level=level)
            values |= {(key, s): measured[f"{key}, {s}"]["value"] for s in settings}
    return values


def judge_claims(results: Results) -> Iterator[Row]:
    """Makes the row of each statement and setting."""
    for (key, setting), values in results.draws.items():
        yield make_row(key, setting, values)


def make_rows(results: Results) -> Iterator[TableRow]:
    """Makes a row for each point of each curve, then for each draw of each statement."""
    for name, curves in results.curves.items():
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
    for (key, setting), values in results.draws.items():
        name, curve = draws.STATISTICS[key].theorem, f"statement “{key}”, {setting}"
        for seed, value in enumerate(values):
            yield {"theorem": name, "curve": curve, "x": seed, "measured": value}


def compare_results(results: Results, theorems: dict[str, Theorem]) -> Iterator[Comparison]:
    """Compares each curve with its prediction, and names outcomes."""
    for name, curves in results.curves.items():
        outcome = judge(curves)
        note = f"{outcome.verdict} {outcome.factor:.3g}" if outcome.verdict == LOOSE else ""
        note = note or ": ".join(filter(None, (outcome.verdict, outcome.failed)))
        theorem = name.replace("_", " ")
        yield Comparison(f"{theorem}: outcome", outcome.verdict, None, note)
        for curve in curves:
            yield compare_curve(theorem, curve, theorems[name].panels[curve.panel])


def compare_curve(theorem: str, curve: Curve, panel: Panel) -> Comparison:
    """Compares a curve at the point that is farthest from its prediction.

    Of draws without a claim no draw stands for the others: their median is compared.

    Args:
        theorem: Name of the theorem.
        curve: The curve.
        panel: Its quantity.
    """
    values = curve.as_array()
    x, predicted, measured = values[find_shown(curve)]
    where = f"{panel.y} where {panel.x} is {x:.4g}{CLAIMED[curve.relation]}"
    if curve.beyond:
        where += "; the conditions of the theorem do not hold here"
    if panel.x == DRAW and curve.relation == "none":
        by_draw = values[:, 2]
        measured = np.median(by_draw)
        where = f"{panel.y}, median of {len(by_draw)} draws; "
        where += f"values {by_draw.min():.3g} to {by_draw.max():.3g}"
    claim = None if np.isnan(predicted) else predicted
    return Comparison(f"{theorem}, {curve.name}", measured, claim, where, source="theorem")


def find_shown(curve: Curve) -> int:
    """Finds the point of a curve that is farthest from its prediction; the last point if it has
    none."""
    _, predicted, measured = curve.as_array().T
    if np.isnan(predicted).all() or curve.relation == "none":
        return len(measured) - 1
    signs = {"=": np.abs, "≤": lambda a: a, "≥": lambda a: -a}[curve.relation]
    scale = np.where(predicted == 0, 1, np.abs(predicted))
    return int(np.nanargmax(signs((measured - predicted) / scale)))


def describe_theorem(theorem: Theorem) -> str:
    """Writes the caption of a theorem's figure: its terms and statement, and the meaning of its
    lines."""
    return (
        f"{theorem.source}. {theorem.terms} Claim: {theorem.statement} Dots are measured values. "
        "If there are solid lines, they are predictions; dashed lines are bounds, and dotted lines "
        "are shown only for comparison. A short bar is a prediction or a bound at one point."
    )


EXPERIMENT = Experiment(
    order=900,
    title="Theorems of later papers",
    brief="theorems about collapse in papers from 2022 to 2026: predicted and measured values",
    claim="Later papers prove how tokens cluster on the sphere, how they come to rest under a "
    "causal mask, and how they collapse in wide networks. They also prove how masks, tied weights, "
    "norms, heads and gains change the collapse. The caption of each figure names the paper and "
    "its number in arXiv.",
    presets={
        "quick": "--theorems=" + ",".join(t for t in THEOREMS if t not in LONG),
        "reported": "--seed=3000 --num_seeds=16",
        "tiny": "--theorems=masks,affine_rank,position",
    },
    figures={name: describe_theorem(theorem) for name, theorem in THEOREMS.items()},
)


def main(options: Flags) -> Run:
    """Measures the missing points, and saves the table, figures and claims."""
    with open_run(options, select_theorems) as run:
        for point in run.measure(measure):
            results, theorems = point.results, point.setup
            point.save_table(make_rows(results))
            for name, theorem in theorems.items():
                point.save_figure(name, plot_theorem, theorem, results.curves[name])
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results, theorems))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
