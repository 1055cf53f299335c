"""Phase diagrams: where tokens collapse and where attention freezes, measured and predicted.

Two floats of a network are swept over a grid: the size of the scores or their law in ln n, the
parts of M = α I + β P + γ C, gains of skips and branches, sizes of weights, the cosine of the
input. Every cell is measured (what is left of the residual, the gradient of the queries over that
of the values, the entropy of attention; with --train its accuracy on a small task) and the boundary
of a closed theory is drawn where one holds: Giorlandino and Goldt 2025, critical scaling (arXiv
2510.05554), Cowsik et al. 2024. All cells are one compiled program. --figure asks for a published
figure, a diagram or curves beside their theory.

    python -m experiments.run_phase --x=score_scale --y=skip_gain
    python -m experiments.run_phase --figure=cowsik4
    python -m experiments.run_phase --variant=shaped --x=beta --x_range=0,2 --y=gamma --y_range=0,2
    python -m experiments.run_phase --figure=mindthegap

Two CPU cores: a minute at the quick preset's sizes, which are five figures. Expected: tokens
collapse below the boundary; above it scores that are large leave attention frozen, with gradients
of another size.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import rank_collapse as rc
from experiments import initial, small_task
from experiments.phase import curves
from experiments.phase.curves import CURVES, Curves
from experiments.phase.networks import ANGLES, AXES, Setup, law_of, network_setup_of
from experiments.phase.sphere import Sphere, sphere_of
from experiments.shell import cli, vocabulary
from experiments.shell.executor import Executor
from experiments.shell.experiment import Drawing, Experiment
from experiments.shell.flag_values import Flags
from experiments.shell.statements import row_of
from rank_collapse.report import figures
from rank_collapse.report.claims import Row
from rank_collapse.report.figures import Figure
from rank_collapse.report.page import Comparison
from rank_collapse.report.statistics import order_of
from rank_collapse.runs.folder import RunFolder

# What --figure asks for, where the flag is not given.
FIGURES = {
    "giorlandino1": "--x=score_scale --x_range=0.2,4 --y=skip_gain --y_range=0,2 --mlp=relu "
    "--depth=12 --num_tokens=64 --d_model=128 --num_heads=1 --cosine=0.1",
    "giorlandino4": "--depth=100 --num_tokens=64 --d_model=128",
    "critical1": "--variant=critical --x=gamma --x_range=0.2,4 --y=cosine --y_range=0,0.75 "
    "--depth=1 --noattention_skip --mlp=none --norm_placement=pre --num_heads=1 --num_tokens=256 "
    "--d_model=512",
    "cowsik4": "--convex --norm_placement=pre --mlp=tanh --x=mlp_scale --x_range=0.5,4 "
    "--y=attention_gain --y_range=0,0.9 --mlp_gain=0.7 --depth=24 --num_tokens=32 --cosine=0.9",
    "mindthegap": "--num_seeds=16",
    "noci1": "--num_heads=4 --d_model=32 --num_seeds=4",
    "geshkovski": "--x=time --y=beta --x_range=0,30 --y_range=0.5,9 --num_x=61 --num_y=18 "
    "--num_tokens=32 --d_model=128 --num_seeds=8",
}

FLAGS = cli.make_flags("phase", num_seeds=2, shows="log10_residual")
vocabulary.define(
    FLAGS,
    depth=12,
    num_heads=1,
    d_model=64,
    num_tokens=32,
    mlp="relu",
    norm_placement="post",
    norm_kind="rms",
    mask="none",
    memory_gb=None,
)
define = cli.definer(FLAGS)
define("string", "x", "score_scale", f"Float on the x axis: {', '.join(AXES)}, or the variant's.")
define("string", "y", "skip_gain", "Float on the y axis.")
vocabulary.numbers(FLAGS, "x_range", [0.2, 4.0], "First and last value of x.", kind=float)
vocabulary.numbers(FLAGS, "y_range", [0.0, 2.0], "First and last value of y.", kind=float)
define("integer", "num_x", 9, "Values of x.", lower_bound=2)
define("integer", "num_y", 9, "Values of y.", lower_bound=2)
define("enum", "variant", "softmax", "Attention.", list(rc.VARIANTS))
define("enum", "figure", None, "A published figure's axes and network.", list(FIGURES))
define("boolean", "attention_skip", True, "Skips around attention.")
define("boolean", "convex", False, "Skips of √(1 − γ²) beside branches of gain γ (Cowsik et al.).")
text = "Residual kept at the boundary of post-norm networks' theory."
define("float", "level", 0.1, text, lower_bound=1e-6)
define("boolean", "train", False, "Train every cell on a small task too, all seeds.")
small_task.define_flags(FLAGS, least=0, seeds=None)
for axis, (default, text) in AXES.items():
    define("float", axis, default, f"Where it is not swept: {text.replace('$', '')}.")

Diagram = Setup | Sphere


def setup_of(options: Flags) -> Diagram | Curves:
    """The grid and the theory of the flags, or the curves of a figure.

    Raises:
        ValueError: An invalid range, or what a network or a figure does not have.
    """
    for argument in FIGURES[options.figure].split() if options.figure else ():
        name, _, value = argument.removeprefix("--").partition("=")
        name, value = (name, value) if value else (name.removeprefix("no"), str(name[:2] != "no"))
        if not options[name].present:
            options[name].value = options[name].parser.parse(value)
    for name in ("x_range", "y_range"):
        ends = options[name].value
        if len(ends) != 2 or not ends[0] < ends[1]:
            raise ValueError(f"--{name}={ends} is not two increasing values")
    if options.train and options.figure in (*CURVES, "geshkovski"):
        raise ValueError(f"--train: --figure={options.figure} has no cells to train")
    if options.train and not options.train_steps:
        raise ValueError("--train with --train_steps=0 trains no cell")
    if options.figure in CURVES:
        found = CURVES[options.figure](options)
    else:
        found = sphere_of(options) if options.figure == "geshkovski" else network_setup_of(options)
    kept = isinstance(found, Setup) and law_of(found) == "kept"
    if options["level"].present and not kept:
        raise ValueError(f"--level={options.level:g}: no theory of the residual kept is shown here")
    return found


def measure_all(options: Flags, setup: Diagram | Curves, run: RunFolder) -> dict[str, np.ndarray]:
    """{name: [y, (x,) s, ...]} of every cell and seed; of curves {name: [s, k]}."""
    if isinstance(setup, Curves):
        return setup.measure(options, run)
    if isinstance(setup, Setup):
        setup.check_boundary()
    cells = {n: jax.tree.map(np.float32, f) for n, f in setup.cells.items()}
    with Executor(options, run, "phase diagram", len(cells) * options.num_seeds) as executor:
        found = executor.measure(setup.measure, cells)
    found = [found[cell] for cell in cells]
    if options.train:
        trained = small_task.train_networks(options, setup.networks, run).values()
        found = [
            a | {"accuracy": b["accuracy"][:, -1]} for a, b in zip(found, trained, strict=True)
        ]
    stacked = {n: np.stack([own[n] for own in found]) for n in found[0]}
    return {n: values.reshape(*setup.shape, *values.shape[1:]) for n, values in stacked.items()}


def limits_of(results: Mapping[str, np.ndarray], setup: Diagram) -> np.ndarray:
    """Which residuals kept [y, x, s] are upper limits; none of tokens on the sphere."""
    if "residual" in results:
        return initial.limits_of(results)
    return np.zeros(next(iter(setup.tables(results).values())).shape, bool)


def means_of(results: Mapping[str, np.ndarray], setup: Diagram) -> dict[str, np.ndarray]:
    """{measure: [y, x]} over seeds; of residuals without limits, NaN where all are limits."""
    limits = limits_of(results, setup)
    return {
        name: np.ma.array(v, mask=limits & (name == "log10_residual")).mean(axis=2).filled(np.nan)
        for name, v in setup.tables(results).items()
    }


def rows_of(results: Mapping[str, np.ndarray], setup: Diagram | Curves) -> list[dict[str, Any]]:
    """One row per cell, or place of a curve, and seed; "limit": the residual is that or less."""
    if isinstance(setup, Curves):
        return curves.rows_of(results, setup)
    found, ((a, xs), (b, ys)) = setup.tables(results), (setup.x, setup.y)
    ranks = initial.measures_of(results).get("rank") if "residual" in results else None
    limits = limits_of(results, setup)
    return [
        {a: float(u), b: float(v), "seed": seed}
        | {name: float(values[j, i, seed]) for name, values in found.items()}
        | ({} if ranks is None else {"effective_rank": float(ranks[j, i, seed])})
        | ({"limit": float(limits[j, i, seed])} if "residual" in results else {})
        | ({"theory": float(setup.theory[0][j, i])} if setup.theory else {})
        for j, v in enumerate(ys)
        for i, u in enumerate(xs)
        for seed in range(next(iter(found.values())).shape[2])
    ]


def summary_of(results: Mapping[str, np.ndarray], setup: Diagram | Curves) -> dict[str, Any]:
    """The range of each measure, and how well the theory sorts the cells by the first.

    Ranges and means are of residuals without limits, which in the order are the smallest.
    """
    if isinstance(setup, Curves):
        return curves.summary_of(results, setup)
    by_seed = setup.tables(results)
    found, limits = means_of(results, setup), limits_of(results, setup)
    known = {n: v[np.isfinite(v)] for n, v in found.items()}
    out = {n: [float(v.min()), float(v.max())] if v.size else None for n, v in known.items()}
    first, draws = next(iter(found.items()))[0], next(iter(by_seed.values()))
    out |= {"x": setup.x[0], "y": setup.y[0], "cells": int(found[first].size), "theory": None}
    out |= {"first": first, "meetings": {}, "limits": int(limits.sum()), "draws": draws.size}
    if isinstance(setup, Sphere):
        out["meetings"] = setup.meetings(results)
    if setup.theory:
        values, level, label = setup.theory
        ordered = draws.mean(axis=2)
        known = np.isfinite(values) & np.isfinite(ordered)
        orders = [order_of(values[known], own[known]) for own in np.moveaxis(draws, 2, 0)]
        above = values[known] > level
        inside = bool(above.any() and not above.all())
        order = order_of(values[known], ordered[known])
        out["theory"] = {"label": label, "inside": inside, "order": order, "orders": orders}
        sides = ~above, above
        out["theory"]["limits"] = [int(limits[known][side].sum()) for side in sides]
        for name in (first, "accuracy") if inside else ():
            if name in found:
                own = found[name][known]
                both = (own[side & np.isfinite(own)] for side in sides)
                out["theory"][name] = [float(v.mean()) if v.size else None for v in both]
    return out


@figures.styled
def phase_figure(results: Mapping[str, np.ndarray], setup: Diagram) -> Figure:
    """Each measure over the grid: what is left of the residual, the gradient of the query weights
    over that of the value weights, the entropy of attention, or what has met on the sphere; white,
    dashed: the boundary of theory. Cells at the edge are half as wide. A residual of 10⁻⁶ is that
    or less: float32 rounds it away, and with it what the gradients come from, which are left blank.
    """
    from matplotlib import patheffects  # here: `--help` need not wait for it

    tables, limits = means_of(results, setup), limits_of(results, setup).all(axis=2)
    fig, axes = figures.figure(1, len(tables), width=4.0, height=3.3)
    (a, xs), (b, ys) = setup.x, setup.y
    for ax, (name, values) in zip(axes.flat, tables.items(), strict=True):
        if name == "log10_residual":
            values = np.where(limits, np.log10(initial.FLOOR), values)
        image = ax.pcolormesh(xs, ys, values, cmap="viridis", shading="nearest")
        fig.colorbar(image, ax=ax, label=setup.labels[name])
        if setup.theory is not None:
            table, level, label = setup.theory
            table = np.ma.masked_invalid(table)  # no theory holds where branches are 0
            if table.count() and table.min() < level < table.max():
                lines = ax.contour(xs, ys, table, [level], colors="white", linestyles="--")
                lines.set_path_effects([patheffects.withStroke(linewidth=3, foreground="black")])
                ax.plot([], [], color="white", ls="--", label=label.replace("λ_a", r"$\lambda_a$"))
                ax.legend(loc="lower right", frameon=True, facecolor="#555555", labelcolor="white")
        ax.set(xlabel=label_of(a), ylabel=label_of(b), xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))
    return fig


def label_of(name: str) -> str:
    """Of an axis."""
    symbol = rf"$\{name}$" if name in ("alpha", "beta", "gamma") else name
    return AXES[name][1] if name in AXES else symbol


def compare(summary: dict[str, Any]) -> list[Comparison]:
    """How the theory orders the cells, or where curves end."""
    if "curves" in summary:
        own = summary["curves"].items()
        return [Comparison(f"{name}, last place", found["last"][0]) for name, found in own]
    theory = summary["theory"]
    if theory is None or theory["order"] is None:
        return []
    what = "the residual kept" if summary["first"] == "log10_residual" else "pairs that have met"
    return [
        Comparison(f"rank correlation of {what} with theory ({theory['label']})", theory["order"])
    ]


def claims(summary: dict[str, Any]) -> list[Row]:
    """Of networks whether λ_a orders them, of curves and of the sphere their own statements."""
    if "curves" in summary:
        return [row_of(key, setting, values) for key, setting, values in summary["answers"]]
    if summary["first"] != "log10_residual":
        return [row_of("clusters", beta, own) for beta, own in summary["meetings"].items()]
    theory = summary["theory"]
    if theory is None or theory["order"] is None or theory["label"] != ANGLES:
        return []
    setting = f"{summary['x']} and {summary['y']}: {theory['label']}"
    return [row_of("phase order", setting, theory["orders"])]


def reading(summary: dict[str, Any]) -> str:
    """Both sides of the boundary, in a sentence."""
    if "curves" in summary:
        return curves.reading(summary)
    log, limits = summary["first"] == "log10_residual", summary["limits"]
    shown = (lambda v: 10**v) if log else float
    what = "of the residual is left" if log else "of the pairs have met"
    ends = [f"{shown(v):.2g}" for v in summary[summary["first"]] or ()]
    if limits:
        less = f"{initial.FLOOR:g} or less ({limits} of {summary['draws']} draws)"
        ends = [less, *ends[-1:]]
    if not ends:
        return f"No residual of {summary['cells']} cells is a finite number."
    said = f"In {summary['cells']} cells {' to '.join(ends)} {what}"
    theory = summary["theory"]
    if theory is None:
        return f"{said}; no closed theory of this library holds for this network."
    if not theory["inside"]:
        return f"{said}; the boundary of theory is outside the swept range."
    mean, sides = "geometric mean" if log else "mean", []
    for where, value, less in zip(
        ("below the boundary of theory", "above it"),
        theory[summary["first"]],
        theory["limits"],
        strict=True,
    ):
        rounded = f"{initial.FLOOR:g} or less"
        kept = rounded if value is None else f"{shown(value):.2g}"
        without = f" without {less} draws of {rounded}" if less and value is not None else ""
        sides.append(f"{kept} {where}{without}")
    said = f"{said}; {mean} {', '.join(sides)}"
    if "accuracy" in theory:
        said += "; accuracy after training {:.2f} and {:.2f}".format(*theory["accuracy"])
    return f"{said}."


def is_diagram(results: Any, setup: Diagram | Curves) -> bool:
    """Whether there is a grid."""
    return not isinstance(setup, Curves)


EXPERIMENT = Experiment.of(
    globals(),
    order=120,
    brief="phase diagrams over any two floats: residual, gradients and entropy beside theory's "
    "boundary",
    title="Phase diagrams",
    claim="Attention at initialisation has phases: scores below a critical size let tokens "
    "collapse, far above it attention freezes on single tokens (Giorlandino and Goldt 2025), and "
    "gains decide at which rate (Cowsik et al. 2024).",
    extra=lambda setup: setup.extra if isinstance(setup, Curves) else None,
    presets={
        "quick": {
            "cowsik4": (
                "--figure=cowsik4",
                "--num_x=7",
                "--num_y=7",
                "--depth=16",
                "--num_seeds=5",
            ),
            "giorlandino4": (
                "--figure=giorlandino4",
                "--depth=24",
                "--num_tokens=32",
                "--d_model=64",
                "--num_seeds=6",
            ),
            "mindthegap": ("--figure=mindthegap",),
            "geshkovski": (
                "--figure=geshkovski",
                "--num_x=31",
                "--num_y=5",
                "--y_range=0.5,4.5",
                "--num_seeds=4",
            ),
            "noci1": ("--figure=noci1", "--train_steps=0", "--num_seeds=16"),
        },
        "paper": {
            "cowsik4": (
                "--figure=cowsik4",
                "--num_x=25",
                "--num_y=25",
                "--num_tokens=256",
                "--num_seeds=5",
            ),
            "giorlandino4": ("--figure=giorlandino4", "--num_seeds=8"),
            "mindthegap": ("--figure=mindthegap", "--num_seeds=64"),
            "geshkovski": ("--figure=geshkovski",),
            "noci1": ("--figure=noci1", "--train_steps=200", "--num_seeds=8"),
        },
        "tiny": (
            "--num_seeds=1",
            "--depth=2",
            "--d_model=4",
            "--num_tokens=3",
            "--num_x=2",
            "--num_y=2",
        ),
    },
    figures={
        "phase": Drawing(phase_figure, Drawing.described(phase_figure).caption, is_diagram),
        "curves": Drawing(
            lambda results, setup: curves.curves_figure(results, setup),
            Drawing.described(curves.curves_figure).caption,
            lambda *own: not is_diagram(*own),
        ),
    },
)
main = EXPERIMENT.main

if __name__ == "__main__":
    cli.run(main, FLAGS)
