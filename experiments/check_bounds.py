"""Counts violations of the paper's lemma and bounds over random draws, in float64.

Draws networks of several shapes with random weights, biases and tokens. Wherever the lemma's
condition max D_ii ≤ 1.2564312 holds, it checks the technical lemma (I − D)P̃ ≤ P ≤ (I + 2D)P̃
for each entry, the bound of every head, and the published bounds with γ* of every layer and
of the network.

Other bounds need no condition, but only rows that share keys and biases: bounds with sums over
heads, around the mean token, and for the diameter. Some networks have MLPs, skips, padding, or a
causal mask, with which these other bounds raise an error. Finally, the command constructs a layer
with two heads whose residual exceeds the published bound from some width on (`--sizes`).

For each kind of network results.csv has γ*. For every bound it has the number of cases in which the
paper claims it, the number of other cases, the violations, and how many powers of ten the bound
lies above the residual. The paper has no such table; for random draws expect 0 violations. Most
of the time goes into compiling one program for each kind of network:

    python -m experiments.check_bounds --num_draws=5000
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.bounds.random_draws import CASES, FREE, Case, single_draw, two_heads
from experiments.lab import (
    Executor,
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    check_names,
    cli,
    describe_figures,
    open_run,
    shared_flags,
)
from experiments.verdicts import Comparison, Row, TableRow, cases_row
from rank_collapse.report import figures

BLOCK = 50  # draws that a device vmaps over
ROUNDING = 1e-13  # decimal logarithms in float64: two tokens of width 1 meet the diameter's bound
# {ratio of `two_heads`: what the residual is over}
BUILT = {
    "over_published": "published, max γ* max β",
    "over_first": "published, γ = 1",
    "over_sums": "with sums over heads",
}
# Bounds under the lemma's condition: each has "{bound}_ok" and "{bound}_tightness"
CONDITIONAL = ("head", "published_layer", "published_stack")
BOUNDED = {
    "head": "a head, theorem 2.2",
    "published_layer": "a layer, theorem 2.3",
    "published_stack": "all layers, theorem 2.3",
} | {name: text for name, (_, _, text) in FREE.items()}
# {bound: the least tightness that is no violation}
LEAST = dict.fromkeys(CONDITIONAL, 0.0) | dict.fromkeys(FREE, -ROUNDING)
STATISTICS = {"min": np.min, "median": np.median, "max": np.max}
ABOVE = "powers of ten above the residual"
HEADS = "heads under the lemma's condition"
# {count: what it is}
RANGES = {
    "head_min": f"bound of {HEADS}: least {ABOVE}",
    "head_max": f"bound of {HEADS}: most {ABOVE}",
    "head_admissible_median": f"bound of {HEADS}: median {ABOVE}",
    "mean_head_admissible_median": f"bound of the same around the mean: median {ABOVE}",
    "gamma_min": f"γ* of {HEADS}: least",
    "gamma_max": f"γ* of {HEADS}: largest",
}

FLAGS = cli.make_flags("check_bounds", shows="head_max")
FLAGS.define("integer", "num_draws", 5000, "Networks drawn.", lower_bound=1)
FLAGS.define("integer", "seed", 0, "Base seed.", lower_bound=0)
FLAGS.define(
    "list", "cases", [case.name for case in CASES], "Kinds of networks, tokens x width x heads."
)
shared_flags.define(FLAGS, seed_chunk=0)
shared_flags.define_numbers(
    FLAGS,
    "sizes",
    [256, 1024, 4096, 16384, 40000, 200000],
    "Widths of the construction of two heads.",
    lower_bound=1,
)

Draws = Mapping[str, np.ndarray]  # {measure: [draws, ...]} of one kind of network
# {"draws": {kind of network: Draws}, "built": [what `two_heads` returns for each width]}
Results = Mapping[str, Any]


def make_cases(options: Options) -> dict[int, Case]:
    """Selects the kinds of networks that the flags name, by their position in the list of all
    kinds.

    Raises:
        ValueError: An unknown kind.
    """
    check_names(options, "cases", [case.name for case in CASES])
    return {i: case for i, case in enumerate(CASES) if case.name in options.cases}


def measure(options: Options, cases: dict[int, Case], folder: RunFolder) -> Results:
    """Measures all draws and the construction, in float64, resumed from the run.

    Draws are computed in blocks of one size, so that a device always vmaps over the same number.

    Args:
        options: The flags.
        cases: The kinds of networks, by their position in the list of all kinds.
        folder: The run folder; results that it already holds are not computed again.
    """
    num_draws = -(-options.num_draws // len(options.cases))  # of each kind
    size = min(BLOCK, num_draws)
    num_blocks, draws = -(-num_draws // size), {}
    total = num_blocks * len(cases)
    with jax.enable_x64(True), Executor(options, folder, f"{size} draws each", total) as executor:
        case_keys = jax.random.split(jax.random.key(options.seed), len(CASES))
        for index, case in cases.items():
            draw_block = jax.vmap(partial(single_draw, case=case))
            blocks = executor.measure(
                lambda keys, _, draw_block=draw_block: draw_block(keys),
                {case.name: None},
                keys=jax.random.split(case_keys[index], num_blocks * size).reshape(-1, size),
                at_once=1,
                level=0,
            )[case.name]
            draws[case] = {n: a.reshape(-1, *a.shape[2:])[:num_draws] for n, a in blocks.items()}
    return {"draws": draws, "built": [two_heads(width) for width in sorted(options.sizes)]}


def pool_draws(draws: Collection[Draws]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Joins the draws of several kinds of networks.

    Args:
        draws: Draws of one or several kinds of networks.

    Returns:
        Every measure, flat; and {bound: its tightness} wherever the bound is claimed: the bounds in
            `CONDITIONAL` under the lemma's condition, the bounds in `FREE` where they were not
            refused.
    """
    names = next(iter(draws))
    flat = {n: np.concatenate([arrays[n].reshape(-1) for arrays in draws]) for n in names}
    tightness = {bound: flat[f"{bound}_tightness"] for bound in LEAST}
    is_claimed = {bound: ~np.isnan(tightness[bound]) for bound in FREE}
    is_claimed |= {bound: flat[f"{bound}_ok"] for bound in CONDITIONAL}
    return flat, {bound: tightness[bound][is_claimed[bound]] for bound in LEAST}


def count_violations(draws: Collection[Draws]) -> dict[str, int | float]:
    """Counts violations, and ranges of tightness, over kinds of networks.

    Args:
        draws: Draws of one or several kinds of networks.

    Returns:
        Columns of results.csv; a range is None where no number exists.
    """
    flat, tightness = pool_draws(draws)
    is_admissible, excess = flat["head_ok"], flat["lemma_excess"]
    counts = {
        "draws": flat["published_stack_ok"].size,
        "lemma_violations": int((excess[is_admissible] > 0).sum()),
        "lemma_violations_elsewhere": int((excess[~is_admissible] > 0).sum()),
    }
    for bound, values in tightness.items():
        counts[f"{bound}_cases"] = values.size
        counts[f"{bound}_refused"] = flat[f"{bound}_tightness"].size - values.size
        counts[f"{bound}_violations"] = int((values < LEAST[bound]).sum())
    # Side by side: where the paper's condition holds, and elsewhere.
    has_both = ~np.isnan(flat["mean_head_tightness"])
    sides = {
        f"{bound}_{side}": flat[f"{bound}_tightness"][is_side & has_both]
        for side, is_side in (("admissible", is_admissible), ("elsewhere", ~is_admissible))
        for bound in ("head", "mean_head")
    }
    for name, values in (tightness | sides | {"gamma": flat["gamma"][is_admissible]}).items():
        for statistic, fn in STATISTICS.items():
            counts[f"{name}_{statistic}"] = float(fn(values)) if values.size else None
    return counts


def make_rows(results: Results) -> list[TableRow]:
    """Makes a row for each kind of network."""
    return [c._asdict() | count_violations([draws]) for c, draws in results["draws"].items()]


@figures.styled
def tightness_figure(results: Results) -> figures.Figure | None:
    """Left: each row is one upper bound of a residual, or of a diameter (the largest distance of
    two tokens). The horizontal axis shows by how many powers of ten the bound lies above this
    number. Markers are medians over random draws, and bars hold the middle 90 % of the draws. The
    bounds of the paper (blue) are drawn only for draws in which the condition of the lemma holds.
    Our bounds (red) need no condition. Right: number of heads (vertical axis) by γ* (horizontal
    axis). γ* is the least factor γ with which the technical lemma holds for a head."""
    flat, tightness = pool_draws(results["draws"].values())
    claimed = {bound: values for bound, values in tightness.items() if values.size}
    if not claimed:  # rows that see different keys have no bound
        return None
    fig, ((bounds_ax, gamma_ax),) = figures.figure(1, 2, width=5.4, height=3.6)
    for place, (bound, values) in enumerate(claimed.items()):
        low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
        color, marker = (figures.color(1), "o") if bound in FREE else (figures.color(0), "s")
        bounds_ax.plot([low, high], [place, place], color=color, lw=3, alpha=0.4)
        bounds_ax.plot(middle, place, color=color, marker=marker)
    labels = (
        f"{BOUNDED[bound]}: {(values < LEAST[bound]).sum()} of {values.size} violated"
        for bound, values in claimed.items()
    )
    bounds_ax.set_yticks(range(len(claimed)), labels)
    bounds_ax.invert_yaxis()
    # Weights that look at one key alone leave 1e-1000: such lines go on beyond the axis.
    bounds_ax.set_xlim(-0.5, 1.3 * max(float(np.median(values)) for values in claimed.values()))
    bounds_ax.axvline(0, color=figures.DARK_GREY, lw=0.9, ls="--")
    bounds_ax.set(
        xlabel="powers of ten above the bounded quantity", title="blue: the paper's, red: ours"
    )
    gamma_ax.hist(flat["gamma"][flat["head_ok"]], 60, color=figures.color(5))
    gamma_ax.set(xlabel="γ*, the least factor that the lemma needs", ylabel="number of heads")
    return fig


@figures.styled
def construction_figure(results: Results):
    """We construct a layer with two heads and the width d, which reads two tokens. One head writes
    √d into one feature, and the other head writes 1 into all features. The vertical axis is the
    residual after this layer, divided by a bound. The horizontal axis is d. Each line is one bound.
    Above the dashed line, the residual exceeds the bound. As d grows, the residual first exceeds
    the published bound of Theorem 2.3. At larger d it also exceeds this bound with γ = 1. It never
    exceeds our bound “with sums over heads”. This bound adds up the norms of all heads, while the
    paper multiplies the largest norm by the number of heads."""
    fig, ((ax,),) = figures.figure(1, 1)
    widths = [built["width"] for built in results["built"]]
    for index, (name, label) in enumerate(BUILT.items()):
        ratios = [built[name] for built in results["built"]]
        ax.plot(widths, ratios, "o-", color=figures.color(index), label=label)
    ax.axhline(1, color=figures.DARK_GREY, lw=0.9, ls="--")
    ax.set(xlabel="width d", ylabel="residual over the bound", xscale="log", yscale="log")
    ax.legend(loc="best")
    return fig


def judge_claims(results: Results) -> list[Row]:
    """Tests the lemma and the published bounds, wherever the lemma's condition holds.

    Args:
        results: Results of `measure`.
    """
    total = count_violations(results["draws"].values())
    rows = (
        ("lemma", "heads of random networks", "lemma", "head"),
        ("bound", "heads of random networks", "head", "head"),
        ("heads bound", "layers of random networks", "published_layer", "published_layer"),
        ("heads bound", "random networks", "published_stack", "published_stack"),
    )
    return [
        cases_row(key, text, total[f"{broken}_violations"], total[f"{among}_cases"], total["draws"])
        for key, text, broken, among in rows
    ]


def compare_results(results: Results) -> Iterator[Comparison]:
    """Compares the violations of the bounds without a condition (none from the paper) with 0, and
    the construction, which is not a draw, with 1; and says how far bounds lie above.

    Args:
        results: Results of `measure`.
    """
    total = count_violations(results["draws"].values())
    for name, (_, _, text) in FREE.items():
        yield Comparison(
            f"bound of {text}: violations",
            total[f"{name}_violations"],
            0,
            f"derived here; of {total[f'{name}_cases']} cases, no number in "
            f"{total[f'{name}_refused']}: rows that see different keys, or a residual of NaN",
            source="expected",
        )
    for built in results["built"]:
        yield Comparison(
            f"two heads built against theorem 2.3, width {built['width']}: residual over the bound",
            built["over_published"],
            "at most 1",
            f"with γ = 1 {built['over_first']:.4g}, over the bound with sums over heads "
            f"{built['over_sums']:.4g}",
            source="bound",
        )
    yield from (Comparison(text, total[name]) for name, text in RANGES.items())


EXPERIMENT = Experiment(
    order=1000,
    title="The lemma and the bounds on random draws",
    brief="how often random networks violate the technical lemma and the bounds",
    claim="Theorem 2.2 bounds the residual of the tokens after attention with one head, and "
    "Theorem 2.3 bounds it after attention with several heads. The paper derives both "
    "theorems from a technical lemma about the attention weights of a head. The lemma has the "
    "condition max D_ii ≤ 1.256, where the matrix D measures how much the rows of the attention "
    "weights differ (appendix). The bounds contain a factor γ, for which the paper gives no value. "
    "We give each "
    "head the least γ with which the lemma holds. For a layer or a network, we take the largest γ "
    "of its heads. The paper does not test the bounds on random networks.",
    presets={
        # Rows that see different keys, as under a mask, are no case of a statement.
        "quick": "--num_draws=500 --cases=8x16x4",
        "reported": "--seed=3000 --num_draws=10000",
        "tiny": "--num_draws=4 --cases=3x4x2",
    },
    figures=describe_figures(tightness_figure, construction_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_cases) as run:
        for point in run.measure(measure):
            results = point.results
            point.save_table(make_rows(results))
            point.save_figure("tightness", tightness_figure, results)
            point.save_figure("construction", construction_figure, results)
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
