"""Residual designs against depth: how updates change the output, and how tokens collapse.

Reproduces the dependency heat maps and the laws of output change of Liu, Liu, Gao, Chen and Han,
"Understanding the difficulty of training Transformers" (2020), for the residual designs of
`rc.network.DESIGNS` at initialisation and, with --training, while they train. On the same networks:
token cosines and gradients by layer, and the one law that predicts all of them from the gains.

    python -m experiments.run_stability
    python -m experiments.run_stability --designs=post,admin_log --mlp=none
    python -m experiments.run_stability --training --mask=causal --mlp=swiglu

Three minutes of CPU time at the defaults. Expect 1 − cosine of Post-LN's tokens to halve with every
layer, updates in random directions to change its output by about N or more, and the other designs
to lie within a third of the law after 100 layers.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from experiments.lab import cli, vocabulary
from experiments.lab.experiment import Experiment, Shown, name_figures, open_run
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.note.stability import figures, networks, results, training
from experiments.note.stability.dependency import centre_of_mass, dependency
from experiments.note.stability.measure import measure_all
from experiments.note.stability.networks import Case, configs_of
from experiments.note.stability.results import ByCase
from experiments.verdicts import Comparison
from experiments.verdicts.claims import Row, mean_row
from experiments.verdicts.statistics import finite_or_none
from rank_collapse.network.designs import DESIGNS

FLAGS = cli.make_flags("stability", num_seeds=8, shows="apart,layer=last", traced=("update_size",))
define = cli.definer(FLAGS)
define("list", "designs", list(networks.DESIGNS), f"Residual designs, out of {', '.join(DESIGNS)}.")
text = "Layers of the networks; two or more."
vocabulary.define_numbers(FLAGS, "depths", [6, 12, 25, 50, 100], text, lower_bound=1)
# Normalised tokens of two numbers are (1, -1) or (-1, 1): equal or opposite, whatever the network.
vocabulary.define(
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
define("float", "update_size", 1e-4, "‖W* − W‖/‖W‖ of every matrix, above 0.", lower_bound=0.0)
define("boolean", "training", False, "Also networks while they train.")
define("list", "train_designs", ["post", "pre", "admin", "deepnorm"], "Designs to train.")
define("integer", "train_depth", 12, "Layers of the trained networks.", lower_bound=1)
define("integer", "train_steps", 300, "Steps.", lower_bound=1)


def measure(options: Flags, configs: Mapping[Case, Any], run: RunFolder) -> dict[str, Any]:
    """All networks of the flags, resumed from the run.

    Returns:
        {"networks": {case: {measure: [s, ...]}} at initialisation, "trained": {cell: ...} of
        `training.trained`, where that was asked for}.
    """
    networks = measure_all(options, configs, run)
    trained = training.trained(options, run) if options.training else {}
    return {"networks": networks, "trained": trained}


def compare(found: dict[str, Any], configs: Any) -> Iterator[Comparison]:
    """What papers state of dependency and gradients, and the one law beside what was measured."""
    for design, own in results.by_design(found["networks"]).items():
        yield collapse_row(design, results.ends(own)[1])
    designs = results.by_design(found["networks"])
    if {"post", "pre"} <= designs.keys():
        yield dependency_row(designs["post"], designs["pre"])
    yield from training.compare(found["trained"])


def collapse_row(where: str, found: Mapping[str, np.ndarray]) -> Comparison:
    """1 − cosine of the deepest network beside the law's, where float32 sees it."""
    measured, expected = found["apart"], np.exp(found["expected_log_apart"].astype(float))
    seen = (measured > results.VISIBLE).all(axis=0)
    last = int(np.flatnonzero(seen)[-1])
    off = np.abs(np.log(results.ratios(measured[:, seen], expected[:, seen])))
    note = "beside it the one law's; largest ratio of the two over layers "
    note += f"{np.exp(off.max()):.3g}, at layer {off.argmax()}"
    quantity = f"{where}: 1 − token cosine after {last} layers"
    law = finite_or_none(expected[:, last].mean())
    return Comparison(quantity, float(measured[:, last].mean()), law, note)


def dependency_row(*designs: ByCase) -> Comparison:
    """How far the outputs of the shallowest networks depend on their last branches."""
    shallow = [results.ends(own)[0] for own in designs]
    published = [np.stack([dependency(one) for one in found["shares"]]) for found in shallow]
    centre = [np.mean([centre_of_mass(one) for one in own]) for own in published]
    return Comparison(
        "last branch's share β_NN² of the output, post and pre",
        "{:.3f}, {:.3f}".format(*(own[:, -1, -1].mean() for own in published)),
        "Post-LN leans on its last branches, Pre-LN spreads",
        f"Liu et al. 2020; {next(iter(designs[0])).depth} layers; centre of mass "
        "{:.2f} and {:.2f} of N".format(*centre),
    )


def claims(found: dict[str, Any], configs: Any) -> Iterator[Row]:
    """Where the exponents of Σ_i β_ii² and of the output change lie among those of three laws."""
    for design, own in results.by_design(found["networks"]).items():
        yield from rows_of_design(design, own)


def rows_of_design(design: str, found: ByCase) -> Iterator[Row]:
    """The rows of one design's networks."""
    branches = results.branches_of(found)
    place = partial(results.place, laws=results.law_exponents(branches))
    changes = {n: results.curve(found, f"change.{n}") for n in (*results.UPDATES, "sgd")}
    slopes = {n: results.exponents(branches, change) for n, change in changes.items()}
    if design in networks.LAW_OF:
        own = results.exponents(branches, results.share_sums(found))
        why = f"Σ β_ii² with the exponent {own.mean():.2f}"
        yield mean_row(networks.LAW_OF[design], design, own, scale=place, note=why)
    expected = results.exponents(branches, results.curve(found, "expected_change")).mean()
    why = {n: f"exponent {own.mean():.2f}" for n, own in slopes.items()}
    random = f"{why['random']}; the one law expects {expected:.2f}"
    yield mean_row("independent updates", design, slopes["random"], scale=place, note=random)
    if design == "deepnorm":
        yield mean_row(design, design, slopes["sgd"], scale=place, note=why["sgd"])
    over = results.ratios(changes["gradient"], results.curve(found, "gradient_bound"))
    along = f"{why['gradient']}, {over.min():.3g} to {over.max():.3g} times the bound"
    more = slopes["gradient"] - slopes["random"]
    yield mean_row("gradient steps", design, more, note=along)


def rows_of(found: dict[str, Any], configs: Any) -> Iterator[dict[str, Any]]:
    """Makes the rows of all networks at initialisation."""
    return results.rows_of(found["networks"])


EXPERIMENT = Experiment(
    order=120,
    title="Residual designs and depth: stability and rank collapse as one law",
    brief="residual designs to 100 layers, at initialisation and (`--training`) while they train: "
    "dependency, change of the output by updates, gradients, token cosines, and the one law that "
    "predicts them",
    claim="Independent updates change the output by C Σ_i β_ii², β_ii² the share of branch i in "
    "the sum after it: O(N) in Post-LN, O(log N) in Pre-LN, O(log N) or O(1) in Admin (Liu et al. "
    "2020, theorem 2); in Post-LN tokens become equal and gradients of queries and keys vanish "
    "(Noci et al. 2022).",
    presets={
        "quick": "--designs=post,admin_log,admin_const --depths=12,36 --num_seeds=4 --d_model=32",
        "paper": "--training",
        "tiny": "--designs=post,pre --depths=1,2 --num_heads=2 --d_model=4 --d_ff=4 --num_tokens=4 "
        " --num_seeds=2 --train_depth=1 --train_steps=2",
    },
)
FIGURES = name_figures(
    figures.one_law_figure,
    figures.dependency_figure,
    figures.output_change_figure,
    training.training_figure,
)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, configs_of) as run:
        points = run.measure(measure)
        return run.publish(
            points,
            table=rows_of,
            figures=FIGURES,
            claims=claims,
            compare=compare,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
