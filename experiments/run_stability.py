"""Residual designs against depth: how updates change the output, and how tokens collapse.

Reproduces the heat maps of dependency and the laws of output change in Liu, Liu, Gao, Chen and Han,
"Understanding the difficulty of training Transformers" (2020). The networks have the residual
designs of `rc.network.DESIGNS` at initialisation. For the same networks, measures token cosines and
gradients by layer, and compares them with the one law that predicts all of them from the gains.

    python -m experiments.run_stability
    python -m experiments.run_stability --designs=post,admin_log --mlp=none

Takes three minutes of CPU time at the defaults. Expect 1 − cosine of the tokens in Post-LN to halve
with every layer, and random updates to change its output by about N or more. The law describes the
mean over networks; a single network may differ from it by a factor of several.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

import rank_collapse as rc
from experiments.lab import Experiment, Flags, Run, cli, describe_figures, open_run, shared_flags
from experiments.stability import stability_results as summary
from experiments.stability.design_measures import measure_all
from experiments.stability.padded_designs import DESIGNS, LAW_OF, make_configs
from experiments.stability.stability_figures import (
    dependency_figure,
    one_law_figure,
    output_change_figure,
)
from experiments.stability.stability_results import ByCase
from experiments.verdicts import Comparison, Row, finite_or_none, make_row, mean_row
from experiments.verdicts.share_intervals import geometric_mean
from rank_collapse.printed import format_count
from rank_collapse.report.wording import words

FLAGS = cli.make_flags(
    "stability", num_seeds=8, can_grow=True, shows="apart,layer=last", traced=("update_size",)
)
FLAGS.define(
    "list", "designs", list(DESIGNS), f"Residual designs, out of {', '.join(rc.network.DESIGNS)}."
)
shared_flags.define_numbers(
    FLAGS, "depths", [6, 12, 25, 50, 100], "Layers of the networks; two or more.", lower_bound=1
)
# Normalised tokens of two numbers are (1, -1) or (-1, 1): equal or opposite, whatever the network.
shared_flags.define(
    FLAGS,
    least={"d_model": 3},
    num_heads=4,
    d_model=64,
    d_ff=None,
    num_tokens=16,
    mlp="gelu",
    mask="none",
    seed_chunk=0,
)
FLAGS.define(
    "float", "update_size", 1e-4, "‖W* − W‖/‖W‖ of every matrix, above 0.", lower_bound=0.0
)


def judge_claims(results: ByCase) -> Iterator[Row]:
    """Tests where the exponents of Σ_i β_ii² and of the output change lie among the exponents of
    the laws."""
    for design, cases in summary.by_design(results).items():
        yield from design_claims(design, cases)


def design_claims(design: str, cases: ByCase) -> Iterator[Row]:
    """Tests one design.

    Args:
        design: Name of the design.
        cases: Networks of the design, shallow first.
    """
    name = words(design)
    branches = summary.branch_counts(cases)
    place = partial(summary.place_between, laws=summary.law_exponents(branches))
    updates = (*summary.UPDATES, "sgd")
    changes = {update: summary.depth_curve(cases, f"change.{update}") for update in updates}
    slopes = {u: summary.fit_exponents(branches, change) for u, change in changes.items()}
    if design in LAW_OF:
        exponents = summary.fit_exponents(branches, summary.sum_shares(cases))
        note = f"Σ β_ii² with the exponent {exponents.mean():.2f}"
        yield mean_row(LAW_OF[design], name, exponents, scale=place, note=note)
    notes = {update: f"exponent {slope.mean():.2f}" for update, slope in slopes.items()}
    expected = summary.fit_exponents(branches, summary.depth_curve(cases, "expected_change"))
    note = f"{notes['random']}; the one law expects {expected.mean():.2f}"
    yield mean_row("independent updates", name, slopes["random"], scale=place, note=note)
    if design == "deepnorm":
        yield make_row(design, name, slopes["sgd"], scale=place, note=notes["sgd"])
    bound = summary.depth_curve(cases, "gradient_bound")
    ratios = summary.geometric_ratios(changes["gradient"], bound)
    note = f"{notes['gradient']}, {ratios.min():.3g} to {ratios.max():.3g} times the bound"
    yield mean_row("gradient steps", name, slopes["gradient"] - slopes["random"], note=note)


def compare_results(results: ByCase) -> Iterator[Comparison]:
    """Compares dependency and tokens with the published numbers and with the one law.

    Args:
        results: Results of `measure_all`.
    """
    networks = summary.by_design(results)
    for design, cases in networks.items():
        yield from compare_collapse(design, summary.first_and_last(cases)[1])
    if {"post", "pre"} <= networks.keys():
        yield compare_dependency(networks["post"], networks["pre"])


def compare_collapse(design: str, measures: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
    """Compares 1 − cosine of the deepest network with the law, where float32 resolves it.

    Means over seeds are geometric, because seeds differ by powers of ten in Post-LN. The law
    predicts the mean; the note compares the error of single networks with the error of the mean.

    Args:
        design: Design of the network.
        measures: Measures of the network, [s, ...].
    """
    name, measured = words(design), measures["apart"]
    expected = np.exp(measures["expected_log_apart"].astype(float))
    is_visible = (measured > summary.VISIBLE).all(axis=0)
    last = int(np.flatnonzero(is_visible)[-1])
    ratios = summary.geometric_ratios(measured[:, is_visible], expected[:, is_visible])
    off = np.abs(np.log(ratios))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_errors = np.abs(np.log(measured[:, is_visible]) - np.log(expected[:, is_visible]))
    worst, layers = np.exp(log_errors.max(axis=1)), np.flatnonzero(is_visible)
    note = "geometric mean"
    quantity = f"{name}: 1 − token cosine after {format_count(last, 'layer')}"
    law = finite_or_none(geometric_mean(expected[:, last]))
    mean = float(geometric_mean(measured[:, last]))
    yield Comparison(quantity, mean, law, note, source="the one law")
    yield Comparison(
        f"{name}: mean over networks over the law, largest ratio",
        float(np.exp(off.max())),
        note=f"geometric mean of {format_count(len(measured), 'network')}, of all layers to "
        f"{last}; at layer "
        f"{layers[off.argmax()]}",
    )
    yield Comparison(
        f"{name}: single networks over the law, largest ratio",
        float(worst.max()),
        note=f"of {format_count(len(worst), 'network')}; the least of a network is "
        f"{worst.min():.3g}",
    )


def compare_dependency(*designs: ByCase) -> Comparison:
    """Reports how much the outputs of the shallowest networks depend on their last branches."""
    shallow = [summary.first_and_last(cases)[0] for cases in designs]
    return Comparison(
        "last branch's share β_NN² of the output, Post-LN and Pre-LN",
        "{:.3f}, {:.3f}".format(*(measures["shares"][:, -1].mean() for measures in shallow)),
        "Post-LN leans on its last branches, Pre-LN spreads",
        f"Liu et al. 2020; {format_count(next(iter(designs[0])).depth, 'layer')}",
    )


EXPERIMENT = Experiment(
    order=120,
    title="Residual designs and depth: stability and rank collapse as one law",
    brief="residual designs with up to 100 layers at initialisation: how much updates of the "
    "weights change the output, how similar tokens become, gradients, and one law that predicts "
    "these quantities",
    claim="Each branch (a sublayer without its skip) adds its output to the states. β_ii² is the "
    "share of the variance of the new states that comes from branch i. The sum of these shares "
    "over all N branches is Σ_i β_ii². Independent random updates of all weights change the output "
    "of the network, and the squared change is C Σ_i β_ii² with a constant C (Liu et al. 2020, "
    "theorem 2). The sum is O(N) in Post-LN and O(log N) in Pre-LN. Admin multiplies skips by "
    "gains; its sum is O(log N) or O(1), depending on the gains. In Post-LN tokens become equal, "
    "and then the gradients of queries and keys vanish (Noci et al. 2022).",
    presets={
        "quick": "--designs=post,admin_log,admin_const --depths=12,36 --num_seeds=4 --d_model=32",
        "reported": "--seed=3000 --num_seeds=4",
        "tiny": "--designs=post,pre --depths=1,2 --num_heads=2 --d_model=4 --d_ff=4 --num_tokens=4 "
        " --num_seeds=2",
    },
    figures=describe_figures(
        one_law_figure,
        dependency_figure,
        output_change_figure,
    ),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_configs) as run:
        for point in run.measure(measure_all):
            results = point.results
            point.save_table(summary.make_rows(results))
            point.save_figure("one_law", one_law_figure, results)
            point.save_figure("dependency", dependency_figure, results)
            point.save_figure("output_change", output_change_figure, results)
            point.save_claims(judge_claims(results))
            point.save_comparisons(compare_results(results))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
