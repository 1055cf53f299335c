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

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from experiments import small_task
from experiments.cures import factors, orders
from experiments.cures.cases import (
    DESIGNS,
    FLOOR,
    SHARES,
    VARIANTS,
    Case,
    Cases,
    cases_of,
    ends,
    measure_cases,
    measures_of,
)
from experiments.cures.figures import curves_figure, table_figure, trained_figure
from experiments.initial import limits_of
from experiments.shell import cli, vocabulary
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.flag_values import Flags, check_names
from rank_collapse.report.claims import Row, of_mean, of_share
from rank_collapse.report.figures import Figure
from rank_collapse.report.intervals import wilson_interval
from rank_collapse.report.page import Comparison
from rank_collapse.report.statistics import between
from rank_collapse.runs.folder import RunFolder

FLAGS = cli.make_flags("cures", num_seeds=4, shows="log10_residual,depth=last")
vocabulary.define(
    FLAGS,
    num_heads=4,
    d_model=64,
    num_tokens=32,
    mlp="gelu",
    norm_placement="post",
    mask="causal",
    memory_gb=None,
)
vocabulary.numbers(FLAGS, "depths", [12, 50], "Layers of the networks.", lower_bound=2)
vocabulary.numbers(
    FLAGS,
    "train_depths",
    [],
    "Layers of networks that are trained too (default none).",
    lower_bound=1,
)
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
    train_tokens: int


def setup_of(options: Flags) -> Setup:
    """The networks of the flags.

    Raises:
        ValueError: An unknown design, variant or factor, or one that the network cannot have.
    """
    check_names(options, "designs", DESIGNS)
    check_names(options, "variants", VARIANTS)
    found, tokens = factors.factors_of(options.factors), options.train_tokens
    return Setup(
        cases_of(options, options.depths, options.d_model, options.num_tokens),
        cases_of(options, options.train_depths, options.train_width, tokens),
        found,
        factors.cells_of(options, found),
        tokens,
    )


def measure_all(options: Flags, setup: Setup, run: RunFolder) -> dict[str, Any]:
    """{"cases", "cells": `measure_cases`, "trained": `small_task.train_networks`}."""
    found = measure_cases(options, {**setup.cases, **setup.cells}, run)
    networks = {f"trained {name}": case.network for name, case in setup.trained.items()}
    trained = small_task.train_networks(options, networks, run) if networks else {}
    return {
        "cases": {name: found[name] for name in setup.cases},
        "cells": {name: found[name] for name in setup.cells},
        "trained": {name: trained[f"trained {name}"] for name in setup.trained},
    }


def trained_of(results: Mapping[str, Any], setup: Setup) -> Iterator[tuple[str, Case, dict]]:
    """(name, case, {"trains", "accuracy", "step_seconds": [s]}) of what was trained."""
    for name, case in setup.trained.items():
        own = results["trained"][name]
        yield (
            name,
            case,
            {
                "trains": small_task.trained(own, setup.train_tokens),
                "accuracy": own["accuracy"][:, -1],
                "step_seconds": own["step_seconds"],
            },
        )


def rows_of(results: Mapping[str, Any], setup: Setup) -> list[dict[str, Any]]:
    """One row per seed of each trained cure, cell of the factorial, and cure at initialisation;
    "limit": the residual is that or less."""
    groups = [("trained", case, found) for _, case, found in trained_of(results, setup)]
    for part, cases in (("cells", setup.cells), ("cases", setup.cases)):
        own = ((case, results[part][name]) for name, case in cases.items())
        groups += [("start", c, measures_of(r) | {"limit": limits_of(r)}) for c, r in own]
    return [
        {"part": part, "kind": case.kind, "cure": case.name, "depth": case.depth, "seed": seed}
        | {n: float(v[seed]) for n, v in found.items()}
        for part, case, found in groups
        for seed in range(len(next(iter(found.values()))))
    ]


def summary_of(results: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """Means over seeds with 95 % intervals, by case; None where a seed has no number."""

    def about(case):
        return {"kind": case.kind, "cure": case.name, "depth": case.depth}

    found = {"trained": {}, "effects": {}, "simple": {}, "factors": dict(setup.factors)}
    found["training"] = training_of(results, setup)
    found["cases"] = {
        name: about(case)
        | {n: ends(v, share=n in SHARES) for n, v in measures_of(results["cases"][name]).items()}
        | {"by_seed": measures_of(results["cases"][name])["log10_residual"].tolist()}
        for name, case in setup.cases.items()
    }
    for name, case, own in trained_of(results, setup):
        count, seeds = int(own["trains"].sum()), len(own["trains"])
        found["trained"][name] = about(case) | {
            "trains": count,
            "seeds": seeds,
            "interval": list(wilson_interval(count, seeds)),
            "accuracy": ends(own["accuracy"], share=True),
            "step_seconds": ends(own["step_seconds"])[0],
        }
    if setup.cells:
        cells = [measures_of(results["cells"][name]) for name in setup.cells]
        found["effects"] = factors.effects_of(cells, setup.factors)
        found["simple"] = factors.simple_effects(cells, setup.factors, "log10_residual")
    return found | {"orders": orders.within_kinds(found["cases"], found["trained"])}


def training_of(results: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """What "train" means: the task's limits, the steps, the width, where variants stand."""
    if not setup.trained:
        return {}
    *_, case = setup.trained.values()  # a variant
    guess, limit = small_task.limits(setup.train_tokens)
    steps = small_task.STEPS * next(iter(results["trained"].values()))["losses"].shape[1]
    return {
        "guess": guess,
        "limit": limit,
        "steps": steps,
        "width": case.config.d_model,
        "placement": case.config.norm_placement,
    }


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """The residual that each cure keeps at each depth, who trains, and the effects of factors."""
    rows = [
        Comparison(f"log10 of the residual kept, {name}", case["log10_residual"][0])
        for name, case in summary["cases"].items()
    ]
    for name, case in summary["trained"].items():
        seconds = case["step_seconds"]
        time = "" if seconds is None else f", {seconds:.2g} s a step"
        accuracy = "no number" if case["accuracy"][0] is None else between(case["accuracy"])
        text = f"{case['trains']} of {case['seeds']} seeds, accuracy {accuracy}{time}"
        rows.append(Comparison(f"trains without warm-up, {name}", text))
    for measure, effects in summary["effects"].items():
        rows += [Comparison(f"effect on {measure}, {n}", e[0]) for n, e in effects.items()]
    rows += [
        Comparison(f"change of log10_residual, {n}", e[0]) for n, e in summary["simple"].items()
    ]
    return rows


def claims(summary: dict[str, Any]) -> list[Row]:
    """What each cure keeps of the residual, and how many of its seeds train."""
    return [
        of_mean("cures keep", name, case["by_seed"], why=limit_text(case["by_seed"]))
        for name, case in summary["cases"].items()
    ] + [
        of_share("cures train", name, case["trains"], case["seeds"])
        for name, case in summary["trained"].items()
    ]


def limit_text(log10_residual: list[float | None]) -> str:
    """How many of these residuals float32 rounds away: they are upper limits."""
    lost = sum(kept is not None and kept <= math.log10(FLOOR) for kept in log10_residual)
    return f"{FLOOR:g} or less in {lost} of {len(log10_residual)} draws" if lost else ""


def reading(summary: dict[str, Any]) -> str:
    """What is kept most and least, how paths and depth go with it, who trains, what decides."""
    cases, trained = summary["cases"], summary["trained"]
    said = [
        kept(cases),
        *lengths(cases),
        *who_trains(trained, summary["training"]),
        *orders.reading(summary["orders"]),
    ]
    if summary["effects"]:
        said.append(factors.reading(summary["effects"], summary["simple"], summary["factors"]))
    return " ".join(said)


def kept(cases: Mapping[str, Any]) -> str:
    """The largest and the smallest mean residual, and the cures whose intervals overlap theirs."""
    deepest, own = of_deepest(cases, "log10_residual")
    if not own:
        return f"After {deepest} layers no residual is a finite number."
    ends = []
    for word, pick in (("largest", max), ("smallest", min)):
        name = pick(own, key=lambda n: own[n][0])
        rounded = " or less" if own[name][0] <= math.log10(FLOOR) else ""
        beside = [n for n in own if n != name and overlap(own[n], own[name])]
        also = f"; not distinguished by 95 % intervals: {', '.join(beside)}" if beside else ""
        ends.append(f"the {word} is {10 ** own[name][0]:.2g}{rounded} ({name}{also})")
    return f"Residual kept after {deepest} layers, geometric means: {' and '.join(ends)}."


def of_deepest(cases: Mapping[str, Any], measure: str) -> tuple[int, dict[str, list]]:
    """(depth, {cure: its mean and ends, where it has a number}) of the deepest networks."""
    deepest = max(case["depth"] for case in cases.values())
    own = {n.split(", L=")[0]: c[measure] for n, c in cases.items() if c["depth"] == deepest}
    return deepest, {n: ends for n, ends in own.items() if ends[0] is not None}


def overlap(a: list[float | None], b: list[float | None]) -> bool:
    """Whether the intervals of two `mean_and_ends` overlap; True where one seed gives none."""
    return None in (*a, *b) or (a[1] <= b[2] and b[1] <= a[2])


def lengths(cases: Mapping[str, Any]) -> Iterator[str]:
    """The shortest and the longest mean path of the deepest networks, in a sentence."""
    own = {n: ends[0] for n, ends in of_deepest(cases, "length")[1].items()}
    if len(own) > 1:
        low, high = min(own, key=own.get), max(own, key=own.get)
        yield (
            f"Paths that carry the output pass {own[low]:.2g} ({low}) to {own[high]:.2g} ({high}) "
            "of the layers' attention on average."
        )


def who_trains(trained: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[str]:
    """What "train" means, and which cures train in all seeds and which in fewer, by depth."""
    if not trained:
        return
    yield (
        f"A seed trains if its accuracy is above {about['limit']:.3f} after {about['steps']} steps "
        f"without warm-up at width {about['width']}; without attention it is "
        f"{about['guess']:.2f}. Variants stand in the {about['placement']}-norm network."
    )
    for depth in sorted({case["depth"] for case in trained.values()}):
        own = {n.split(", L=")[0]: c for n, c in trained.items() if c["depth"] == depth}
        all_do = [n for n, c in own.items() if c["trains"] == c["seeds"]]
        part = [f"{n} ({c['trains']} of {c['seeds']})" for n, c in own.items() if n not in all_do]
        yield (
            f"With {depth} layers all seeds train of {', '.join(all_do) or 'none'}"
            + (f"; fewer of {', '.join(part)}." if part else ".")
        )


def of_summary(part: str, draw: Callable[..., Figure], more: Callable[[Setup], tuple]) -> Drawing:
    """A figure of a part of the summary, where it is not empty."""
    return Drawing(
        lambda results, setup: draw(summary_of(results, setup)[part], *more(setup)),
        " ".join(inspect.getdoc(draw).split()),
        lambda results, setup: bool(setup.trained if part == "trained" else setup.cells),
    )


EXPERIMENT = Experiment.of(
    globals(),
    order=125,
    brief="residual designs and attention variants side by side: residual, slope, gradients, rank, "
    "entropy",
    title="Cures of rank collapse",
    claim="Skips and MLPs stop the degeneration of attention (Dong et al. 2021, section 3); since "
    "then norms, gains and other attention were published for the same end.",
    presets={
        "quick": (
            "--depths=12",
            "--d_model=32",
            "--num_tokens=16",
            "--designs=post,depth_scaled,pre,rezero",
            "--variants=centred,value_skipinit,softpick,differential",
            "--factors=residual:0.25:1,temperature:0.5:2",
        ),
        "paper": (
            "--depths=12,50,100",
            "--num_seeds=8",
            "--train_depths=18,36",
            "--train_width=16",
            "--train_steps=200",
            "--factors=depth:12:48,width:32:128,heads:1:8,residual:0.25:1,temperature:0.5:2",
        ),
        "tiny": (
            "--num_seeds=2",
            "--depths=2",
            "--num_heads=1",
            "--d_model=4",
            "--num_tokens=3",
            "--mlp=none",
            "--designs=post,depth_scaled",
            "--variants=shaped",
            "--factors=residual:0.5:1,temperature:1:2",
        ),
    },
    figures={
        "cures": Drawing.described(table_figure),
        "curves": Drawing.described(curves_figure),
        "trained": of_summary("trained", trained_figure, lambda setup: (setup.trained,)),
        "effects": of_summary("effects", factors.effects_figure, lambda setup: ()),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
