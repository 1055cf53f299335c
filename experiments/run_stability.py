"""Residual designs against depth: how updates change the output, and how tokens collapse.

Reproduces the dependency heat maps and the laws of output change of Liu, Liu, Gao, Chen and Han,
"Understanding the difficulty of training Transformers" (2020), for the residual designs of
`rc.DESIGNS` at initialisation. On the same networks: residual, token
cosine and gradients by layer, and the one law that predicts all of them from the gains.

    python -m experiments.run_stability
    python -m experiments.run_stability --parts=encoders --designs=post,admin_log --mlp=none
    python -m experiments.run_stability --parts=encoders,training --mask=causal --mlp=swiglu

Five and a half minutes of CPU time at the defaults on a busy machine, half of it for the encoders.
Expect 1 − cosine of Post-LN's tokens to halve with every layer (in a decoder, with two attentions
in a layer, to fall to a third), updates in random directions to change its output by about N or
more, and the other designs to lie within a third of the law after 100 layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.options import Flags
from experiments.stability import figures, networks, results, training
from experiments.stability.measure import measure_all
from experiments.stability.networks import KINDS, PARTS, Part, parts_of
from experiments.stability.results import Results
from rank_collapse.measures.dependency import centre_of_mass, dependency
from rank_collapse.network.designs import DESIGNS
from rank_collapse.report import Comparison
from rank_collapse.report.claims import Row, of_mean
from rank_collapse.report.statistics import number, slope
from rank_collapse.runs.folder import RunFolder

FLAGS = cli.make_flags("stability", num_seeds=8, shows="apart,layer=last", traced=("update_size",))
define = cli.definer(FLAGS)
define("list", "parts", ["encoders", "encoder_decoders"], f"Parts, out of {', '.join(PARTS)}.")
define("list", "designs", list(networks.DESIGNS), f"Residual designs, out of {', '.join(DESIGNS)}.")
for name, default, text in (
    ("depths", [6, 12, 25, 50, 100], "Layers of the networks; two or more."),
    ("layer_depths", [6, 50], "Depths that are also measured by layer; two or more."),
    ("pair_depths", [3, 6, 12, 25], "Layers of each half of encoder-decoders; two or more."),
    ("pair_layer_depths", [6, 25], "Depths of them that are also measured by layer; two or more."),
):
    vocabulary.numbers(FLAGS, name, default, text, lower_bound=1)
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
define("boolean", "log_residual", True, "Also residuals in logarithms, by a separate pass.")
define("float", "update_size", 1e-4, "‖W* − W‖/‖W‖ of every matrix, above 0.", lower_bound=0.0)

define("list", "train_designs", ["post", "pre", "admin", "deepnorm"], "Designs to train.")
define("integer", "train_depth", 12, "Layers of the trained networks.", lower_bound=1)
define("integer", "train_steps", 300, "Steps.", lower_bound=1)


def measure(options: Flags, parts: Sequence[Part], run: RunFolder) -> dict[str, Any]:
    """All networks of the flags, resumed from the run.

    Returns:
        {"networks": {case: {measure: [s, ...]}} at initialisation, "trained": {cell: ...} of
        `training.trained`, where that part was asked for}.
    """
    networks = measure_all(options, parts, run)
    trained = training.trained(options, run) if "training" in options.parts else {}
    return {"networks": networks, "trained": trained}


def named(kind: str, design: str) -> str:
    """A design, of an encoder-decoder where it is one."""
    return design if kind == "encoder" else f"{design}, encoder-decoder"


def compare(found: dict[str, Any], parts: Any) -> Iterator[Comparison]:
    """What papers state of dependency and gradients, and the one law beside what was measured."""
    for kind in KINDS:
        of_kind = results.of_kind(found, kind)
        for design, own in results.by_design(of_kind).items():
            yield collapse_row(named(kind, design), results.ends(own)[1])
        layered = results.by_design(results.by_layer(of_kind))
        if {"post", "pre"} <= layered.keys():
            yield dependency_row(named(kind, "post and pre"), layered["post"], layered["pre"])
        if "post" in layered:
            yield from gradient_rows(named(kind, "post"), results.ends(layered["post"])[1])
    yield from training.compare(found["trained"])


def collapse_row(where: str, found: Mapping[str, np.ndarray]) -> Comparison:
    """1 − cosine of the deepest network beside the law's, where float32 sees it."""
    measured, expected = found["apart"], np.exp(found["expected_log_apart"].astype(float))
    seen = (measured > results.VISIBLE).all(axis=0)
    last = int(np.flatnonzero(seen)[-1])
    off = np.abs(np.log(results.ratios(measured[:, seen], expected[:, seen])))
    note = "the one law does not cover branches that see tokens that no norm has scaled"
    if np.isfinite(off).all():
        note = "beside it the one law's; largest ratio of the two over layers "
        note += f"{np.exp(off.max()):.3g}, at layer {off.argmax()}"
    quantity = f"{where}: 1 − token cosine after {last} layers"
    law = number(expected[:, last].mean())
    return Comparison(quantity, float(measured[:, last].mean()), law, note)


def dependency_row(where: str, *designs: Results) -> Comparison:
    """How far the outputs of the shallowest networks depend on their last branches."""
    shallow = [results.ends(own)[0] for own in designs]
    published = [np.stack([dependency(one) for one in found["shares"]]) for found in shallow]
    centre = [np.mean([centre_of_mass(one) for one in own]) for own in published]
    off = [
        np.abs(found["exact_shares"][:, :, :-1] - own).mean(axis=0).max()
        for found, own in zip(shallow, published, strict=True)
    ]
    return Comparison(
        f"last branch's share β_NN² of the output, {where}",
        "{:.3f}, {:.3f}".format(*(own[:, -1, -1].mean() for own in published)),
        "Post-LN leans on its last branches, Pre-LN spreads",
        f"Liu et al. 2020; {next(iter(designs[0])).depth} layers; centre of mass "
        "{:.2f} and {:.2f} of N; exact shares differ by {:.3f} and {:.3f} at most".format(
            *centre, *off
        ),
    )


def gradient_rows(where: str, found: Mapping[str, np.ndarray]) -> Iterator[Comparison]:
    """How gradients of queries fall with the tokens' differences, where these change enough."""
    ratio = found["gradients.attention.w_q"] / found["gradients.attention.w_v"]
    slopes, apart = [], found["apart"][:, :-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        for x, y in zip(np.log(apart), np.log(ratio), strict=True):
            seen = np.isfinite(x) & np.isfinite(y) & (x > np.log(results.GRADIENT_VISIBLE))
            if seen.sum() > 1 and np.ptp(x[seen]) >= 0.5:
                slopes.append(slope(x[seen], y[seen]))
    if slopes:
        yield Comparison(
            f"{where}: exponent of ‖∂W_Q‖/‖∂W_V‖ in 1 − token cosine, by layer",
            float(np.mean(slopes)),
            "1: they vanish with it",
            f"Noci et al. 2022; the ratio falls from {ratio[:, 0].mean():.2g} in the first layer "
            f"to {ratio[:, -1].mean():.2g} in the last",
        )


def claims(found: dict[str, Any], parts: Any) -> Iterator[Row]:
    """Where the exponents of Σ_i β_ii² and of the output change lie among those of three laws."""
    for kind in KINDS:
        for design, own in results.by_design(results.of_kind(found, kind)).items():
            yield from rows_of_design(design, named(kind, design), own)


def rows_of_design(design: str, where: str, found: Results) -> Iterator[Row]:
    """The rows of one design's networks."""
    branches, (of_shares, shares) = results.branches_of(found), results.share_sums(found)
    place = partial(results.place, laws=results.law_exponents(branches))
    changes = {n: results.curve(found, f"change.{n}") for n in (*results.UPDATES, "sgd")}
    slopes = {n: results.exponents(branches, change) for n, change in changes.items()}
    if design in networks.LAW_OF:
        own = results.exponents(of_shares, shares)
        why = f"Σ β_ii² with the exponent {own.mean():.2f}"
        scale = partial(results.place, laws=results.law_exponents(of_shares))
        yield of_mean(networks.LAW_OF[design], where, own, scale=scale, why=why)
    expected = results.exponents(branches, results.curve(found, "expected_change")).mean()
    law = f"expects {expected:.2f}" if np.isfinite(expected) else "does not cover it"
    why = {n: f"exponent {own.mean():.2f}" for n, own in slopes.items()}
    random = f"{why['random']}; the one law {law}"
    yield of_mean("independent updates", where, slopes["random"], scale=place, why=random)
    if design == "deepnorm":
        yield of_mean(design, where, slopes["sgd"], scale=place, why=why["sgd"])
    over = results.ratios(changes["gradient"], results.curve(found, "gradient_bound"))
    along = f"{why['gradient']}, {over.min():.3g} to {over.max():.3g} times the bound"
    more = slopes["gradient"] - slopes["random"]
    yield of_mean("gradient steps", where, more, why=along)


# {name: (what draws it, its caption of encoder-decoders)}
FIGURES = {
    "one_law": (figures.one_law_figure, "The same law of decoders that read an encoder as deep."),
    "dependency": (
        figures.dependency_figure,
        "Dependency in decoders: a layer has three branches, attention to itself, to the memory, "
        "and the MLP.",
    ),
    "output_change": (
        figures.change_figure,
        "Change of the decoder's output after an update of every matrix of both halves, against "
        "the branches of both.",
    ),
    "gradients": (figures.gradient_figure, "Gradients of the decoder's three kinds of branches."),
    "by_layer": (figures.layer_figure, "Residual ratio, token cosine, residual of the decoders."),
    "omega": (figures.omega_figure, "Gains of the skips of encoder and decoder."),
}


def drawings_of(kind: str) -> dict[str, Drawing]:
    """The figures of the networks of one kind, where there are any."""
    part = partial(results.of_kind, kind=kind)
    if kind == "encoder":
        return {name: Drawing.described(draw, part) for name, (draw, _) in FIGURES.items()}
    return {f"{kind}_{name}": Drawing.of_part(part, *own) for name, own in FIGURES.items()}


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=120,
    brief="residual designs to 100 layers, encoders and encoder-decoders, at initialisation and "
    "(`--parts=...,training`) while they train: dependency, change of the output by updates, "
    "gradients, token cosines, and the one law that predicts them",
    title="Residual designs and depth: stability and rank collapse as one law",
    claim="Independent updates change the output by C Σ_i β_ii², β_ii² the share of branch i in "
    "the sum after it: O(N) in Post-LN, O(log N) in Pre-LN, O(log N) or O(1) in Admin (Liu et al. "
    "2020, theorem 2); in Post-LN tokens become equal and gradients of queries and keys vanish "
    "(Noci et al. 2022).",
    presets={
        "quick": "--parts=encoders --designs=post,admin_log,admin_const --depths=12,36 "
        "--nolog_residual --layer_depths=12,36 --num_seeds=4 --d_model=32",
        "paper": "--parts=encoders,encoder_decoders,training",
        "tiny": "--parts=encoders --designs=post,pre --depths=1,2 --layer_depths=1,2 "
        "--pair_depths=1,2 --pair_layer_depths=1,2 --num_heads=2 --d_model=4 --d_ff=4 "
        "--num_tokens=4 --num_seeds=2 --train_depth=1 --train_steps=2",
    },
    setup=parts_of,
    measure=measure,
    table=lambda found, parts: results.rows_of(found["networks"]),
    claims=claims,
    compare=compare,
    figures={
        **drawings_of("encoder"),
        **drawings_of("encoder_decoder"),
        "training": Drawing.described(training.training_figure, lambda found: found["trained"]),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
