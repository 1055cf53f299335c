"""Cures of rank collapse: residual designs and attention variants, with the same measurements.

Since Dong, Cordonnier and Loukas (2021) many answers to rank collapse were published, each with its
own measure. Here each is a configuration of one network at initialisation, on the same tokens and
seeds: how much of the residual remains at each depth and how fast it falls, the gradient of the
query weights over that of the value weights, the effective rank of the output, the entropy of
attention, and the mean length of the paths that carry the output. Designs have softmax attention,
variants the residual design of --norm_placement. With --train_depths the same cures are trained on
a small task without warm-up; with --factors a two-level factorial says which of depth, width,
heads, residual scale and temperature decides.

    python -m experiments.run_cures
    python -m experiments.run_cures --designs=post,deepnorm --variants=softmax --depths=12,100
    python -m experiments.run_cures --designs=post --variants=softmax --train_depths=18,36
    python -m experiments.run_cures --designs=post --variants=softmax --factors=depth:6:24,heads:1:4

Two CPU cores: about a minute at the quick preset's sizes. Expected: post-norm networks keep least
of the residual, and the gradients of their queries fall with it. ReZero and `value_skipinit` keep
the residual, but start with a gain of 0: the gradients of their queries are 0, which have no
logarithm. What authors train of a variant beside its weights stays where it starts.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments import small_task
from experiments.cures import factors, orders
from experiments.cures.cases import (
    DESIGNS,
    FLOOR,
    VARIANTS,
    Cases,
    cases_of,
    ends,
    measure_cases,
)
from experiments.cures.figures import cures_figure, curves_figure, trained_figure
from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.options import Flags, check_names
from experiments.shell.statements import row_of
from rank_collapse.report import Comparison
from rank_collapse.report.claims import Row, of_share
from rank_collapse.report.statistics import between, by_seed, mean_and_ends
from rank_collapse.runs.folder import RunFolder

KEPT = "log10_residual"

FLAGS = cli.make_flags("cures", num_seeds=4, shows="log10_residual,depth=last", traced=("cosine",))
vocabulary.define(
    FLAGS,
    num_heads=4,
    d_model=64,
    num_tokens=32,
    mlp="gelu",
    norm_placement="post",
    mask="causal",
    seed_chunk=0,
)
vocabulary.numbers(FLAGS, "depths", [12, 50], "Layers of the networks.", lower_bound=2)
text = "Layers of networks that are trained too (default none)."
vocabulary.numbers(FLAGS, "train_depths", [], text, lower_bound=1)
define = cli.definer(FLAGS)
define("list", "designs", DESIGNS, f"Residual designs, out of {', '.join(DESIGNS)}.")
define("list", "variants", VARIANTS, f"Attention variants, out of {', '.join(VARIANTS)}.")
define("float", "cosine", 0.2, "Cosine of the input's tokens.", lower_bound=0, upper_bound=0.99)
define("integer", "train_width", 32, "Width of the networks that are trained.", lower_bound=4)
small_task.define_flags(FLAGS)
define(
    "list",
    "factors",
    [],
    "Factors of a two-level design with their levels, out of "
    f"{', '.join(factors.FACTORS)}: depth:12:48,width:32:128 (default none).",
)


class Setup(NamedTuple):
    """What the flags ask for: cures, cures that are trained, and the cells of a factorial."""

    cases: Cases
    trained: Cases
    factors: factors.Factors
    cells: Cases
    options: Flags


def setup_of(options: Flags) -> Setup:
    """The networks of the flags.

    Raises:
        ValueError: An unknown design, variant or factor, or one that the network cannot have.
    """
    check_names(options, "designs", DESIGNS)
    check_names(options, "variants", VARIANTS)
    levels = factors.factors_of(options.factors)
    return Setup(
        cases_of(options, options.depths, options.d_model, options.num_tokens),
        cases_of(options, options.train_depths, options.train_width, options.train_tokens),
        levels,
        factors.cells_of(options, levels),
        options,
    )


def measure_all(options: Flags, setup: Setup, run: RunFolder) -> dict[str, Any]:
    """{"cases", "cells": `cases.measures_of`, "trained": {"trains", "accuracy" at the end,
    "step_seconds"}} of every network, [s] each."""
    found = measure_cases(options, {**setup.cases, **setup.cells}, run)
    networks = {f"trained {name}": case.network for name, case in setup.trained.items()}
    trained = small_task.train_networks(options, networks, run) if networks else {}
    return {
        "cases": {name: found[name] for name in setup.cases},
        "cells": {name: found[name] for name in setup.cells},
        "trained": {
            name.removeprefix("trained "): {
                "trains": small_task.trained(own, options.train_tokens),
                "accuracy": own["accuracy"][:, -1],
                "step_seconds": own["step_seconds"],
            }
            for name, own in trained.items()
        },
    }


def rows_of(results: Mapping[str, Any], setup: Setup) -> Iterator[dict[str, Any]]:
    """One row per seed of each trained cure, cell of the factorial, and cure at initialisation;
    "limit": the residual is that or less."""
    for part in ("trained", "cells", "cases"):
        for name, case in getattr(setup, part).items():
            at = "trained" if part == "trained" else "start"
            about = {"part": at, "kind": case.kind, "cure": case.name, "depth": case.depth}
            columns = {n: v.astype(float) for n, v in results[part][name].items() if v.ndim == 1}
            yield from (about | row for row in by_seed(columns))


def compare(results: Mapping[str, Any], setup: Setup) -> Iterator[Comparison]:
    """The residual that each cure keeps at each depth, who trains, the effects of factors, and what
    orders the cures as training does."""
    options, (guess, limit) = setup.options, small_task.limits(setup.options.train_tokens)
    for name, found in results["cases"].items():
        yield Comparison(f"log10 of the residual kept, {name}", ends(found[KEPT])[0])
    task = (
        f"accuracy above {limit:.3f} after {small_task.steps_of(options)[-1]} steps at width "
        f"{options.train_width}; without attention it is {guess:.2f}"
    )
    for name, found in results["trained"].items():
        accuracy = between(mean_and_ends(found["accuracy"], share=True))
        yield Comparison(
            f"trains without warm-up, {name}",
            f"{found['trains'].sum()} of {found['trains'].size} seeds, accuracy {accuracy}, "
            f"{found['step_seconds'].mean():.2g} s a step",
            note=task,
        )
    if cells := results["cells"]:
        for measure in factors.SHOWN:
            for name, effect in factors.effects_of(cells, setup.factors, measure).items():
                yield Comparison(f"effect on {measure}, {name}", ends(effect)[0])
        for name, change in factors.simple_effects(cells, setup.factors, KEPT).items():
            yield Comparison(f"change of {KEPT}, {name}", ends(change)[0])
    for kind, order in orders.within_kinds(results, setup).items():
        yield Comparison(
            f"{kind}s: rank correlation of the accuracy with the effective rank at initialisation, "
            "less that with the residual kept",
            between(order["difference"]),
            note="{rank:.2f} and {residual:.2f}; {cures} cures, {networks} networks at "
            "initialisation".format(**order),
        )


def claims(results: Mapping[str, Any], setup: Setup) -> Iterator[Row]:
    """What each cure keeps of the residual, and how many of its seeds train."""
    for name, found in results["cases"].items():
        lost, draws = found["limit"].sum(), len(found["limit"])
        why = f"{FLOOR:g} or less in {lost} of {draws} draws" if lost else ""
        yield row_of("cures keep", name, found[KEPT], why=why)
    for name, found in results["trained"].items():
        yield of_share("cures train", name, int(found["trains"].sum()), len(found["trains"]))


EXPERIMENT = Experiment(
    about=__doc__,
    flags=FLAGS,
    order=125,
    brief="residual designs and attention variants side by side: residual, slope, gradients, rank, "
    "entropy",
    title="Cures of rank collapse",
    claim="Skips and MLPs stop the degeneration of attention (Dong et al. 2021, section 3); since "
    "then norms, gains and other attention were published for the same end.",
    presets={
        "quick": "--depths=12 --d_model=32 --num_tokens=16 --designs=post,depth_scaled,pre "
        "--variants=centred,attn_scale --factors=residual:0.25:1,temperature:0.5:2",
        "paper": "--depths=12,50,100 --num_seeds=8 --train_depths=18,36 --train_width=16 "
        "--train_steps=200 "
        "--factors=depth:12:48,width:32:128,heads:1:8,residual:0.25:1,temperature:0.5:2",
        "tiny": "--num_seeds=2 --depths=2 --num_heads=1 --d_model=4 --num_tokens=3 --mlp=none "
        "--designs=post,depth_scaled --variants=shaped --factors=residual:0.5:1,temperature:1:2",
    },
    setup=setup_of,
    measure=measure_all,
    table=rows_of,
    claims=claims,
    compare=compare,
    figures={
        **Drawing.all(cures_figure, curves_figure),
        "trained": Drawing.described(trained_figure, lambda results: results["trained"]),
        "effects": Drawing.described(factors.effects_figure, lambda results: results["cells"]),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
