"""Depth parametrisations before training: what ten steps do to networks with 2 to 64 layers.

Trains pre-norm language models over bytes under the rules of `rc.depth_rule`, and fits each
quantity by a power of the depth. Reproduces figure 7 of Dey et al. 2025 (CompleteP), and with
another estimator the distance from linearisation in its figure 6. Also measures what happens to the
tokens, at several learning rates.

    python -m experiments.run_depth_check --rule=mup,completep --depth=2,8,32
    python -m experiments.run_depth_check --rule=mup,half,completep --depth=2,4,8,16,32,64 \\
        --d_model=64,256 --num_seeds=3
    python -m experiments.run_depth_check --rule=sp,mup,completep --depth=2,4,8,16,32,64 \\
        --learning_rate=1e-4,3e-4,1e-3,3e-3 --text=data/RTE/train.tsv

The rule mup scales with the width alone; the figure calls it SP. The rule sp scales nothing. On two
cores the second command takes 70 s of CPU time at --d_model=64 and 390 s at 256. The third command
takes 25 s for each depth, most of it for compiling, and 0.06 s for each network and layer: 900 s
with 8 seeds. At rate 1e-3 expect mean |x_L| at step 1 to be near the published value. Expect deeper
networks to have more similar tokens under mup, but not under completep.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import xarray as xr

import rank_collapse as rc
from experiments.lab import (
    Executor,
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    content_hash,
    describe_figures,
    labelled,
    open_run,
    shared_flags,
)
from experiments.train.byte_networks import byte_model, text_bytes, train_network
from experiments.verdicts import Comparison, Row, TableRow
from experiments.verdicts.share_intervals import slope
from rank_collapse.report import figures
from rank_collapse.report.wording import describe_value
from rank_collapse.scaling.coord_check import MEANING, coordinates_figure
from rank_collapse.scaling.depth_rules import RULES, DepthRule
from rank_collapse.text.tokens import read_texts
from rank_collapse.text.words import default_text

# Figure 7 of Dey et al. 2025, width 256, digitised to 5 %: mean |x_L| by rule, step and depth.
DEPTHS = (2, 4, 8, 16, 32, 64)
PUBLISHED = (
    (0.135, 0.202, 0.301, 0.449, 0.606, 0.861),  # step 1: mup, half, completep
    (0.135, 0.135, 0.142, 0.142, 0.142, 0.142),
    (0.135, 0.095, 0.070, 0.052, 0.039, 0.032),
    (0.61, 2.72, 5.77, 13.5, 23.4, 47.2),  # step 10; that of half is not read off
    (np.nan,) * len(DEPTHS),
    (0.61, 0.64, 0.61, 0.78, 0.74, 0.67),
)
DEEP = f"--depth={','.join(map(str, DEPTHS))}"
AXES = ("rule", "learning_rate", "depth", "d_model")
PUBLISHED_RATE = 1e-3  # At which we compare with the figure; it is the default
COLUMNS = (*MEANING, "loss")

FLAGS = cli.make_flags(
    "depth_check",
    num_seeds=8,
    can_grow=True,
    shows="stream,step=last",
    traced=("rule", "learning_rate"),
)
FLAGS.define("enum", "rule", "completep", "Depth parametrisation.", list(RULES))
shared_flags.define(FLAGS, depth=8, d_model=64, num_tokens=64, batch_size=4, seed_chunk=0)
shared_flags.define(FLAGS, learning_rate=PUBLISHED_RATE, weight_decay=0.1)
FLAGS.define(
    "integer", "base_depth", 2, "Layers of the network whose rates are known.", lower_bound=1
)
FLAGS.define("integer", "base_width", 256, "Its width.", lower_bound=1)
FLAGS.define("integer", "steps", 10, "Training steps.", lower_bound=2)
shared_flags.define_text(FLAGS, "UTF-8 text or table (default: a short text of the package).")


class Setup(NamedTuple):
    """What the flags ask for."""

    config: rc.TransformerConfig
    text: np.ndarray  # bytes as numbers
    source: str  # of the text


def make_setup(options: Options) -> Setup:
    """Makes the network and its training, and reads the bytes of the text.

    Args:
        options: The flags.

    Raises:
        ValueError: A text that is too short or cannot be read.
    """
    path, tokens = options.text, options.num_tokens
    text = default_text() if path is None else "\n".join(read_texts(path))
    config = byte_model(options.depth, options.d_model, tokens)
    source = "the package's text" if path is None else "/".join(Path(path).parts[-2:])
    return Setup(config, text_bytes(text, tokens), source)


def identity(setup: Setup) -> dict[str, str]:
    """Returns what identifies the text, for config.json."""
    return {"text_sha256": content_hash(setup.text.tobytes())}


def measure(options: Options, setup: Setup, folder: RunFolder) -> xr.Dataset:
    """Measures one network under one rule by seed and step; rules and rates share a program.

    Args:
        options: The flags.
        setup: Setup of one point; all points have the same text.
        folder: The run folder; results that it already holds are not computed again.
    """
    base = byte_model(options.base_depth, options.base_width, options.num_tokens)

    def make_cells(point: Options) -> dict[str, tuple[DepthRule, float, float]]:
        rule = rc.depth_rule(point.rule, base)
        return {"": (rule, point.learning_rate, point.weight_decay)}

    def measure_seed(
        key: jax.Array, floats: tuple[DepthRule, jax.Array, jax.Array]
    ) -> dict[str, jax.Array]:
        """Trains one seed with a depth rule, a learning rate and a weight decay, and measures its
        steps."""
        rule, rate, decay = floats
        return train_network(
            key,
            setup.text,
            setup.config,
            rule,
            rate=rate,
            weight_decay=decay,
            steps=options.steps,
            batch_size=options.batch_size,
        )

    with Executor(options, folder, f"L={options.depth}, d={options.d_model}") as executor:
        arrays = executor.measure(measure_seed, make_cells)[""]
    results = labelled.make_dataset(arrays, ("step",))
    return results.assign_coords(step=np.arange(1, options.steps + 1))


def make_rows(results: xr.Dataset) -> Iterator[TableRow]:
    """Makes a row for each rule, rate, depth, width, seed and step."""
    return labelled.table_rows(results, (*AXES, "seed", "step"), COLUMNS)


def choose_rate(results: xr.Dataset) -> float:
    """Chooses the learning rate of the figure: `PUBLISHED_RATE`, else the first."""
    rates = results.learning_rate.values.tolist()
    return PUBLISHED_RATE if PUBLISHED_RATE in rates else rates[0]


@figures.styled
def quantities_figure(results: xr.Dataset):
    """Networks with L layers learn a text. Each panel shows one quantity (vertical axis) against L
    (horizontal axis). Each colour is one rule that scales a network with its depth. x_L are the
    states after the last layer, and Δx_L is the change of these states in one training step. W_Q is
    the query matrix. Solid lines show the last training step. Dotted lines show the first one,
    where it has a number. Lines are geometric means over seeds, and bands are one standard
    deviation of the logarithm."""
    rate, width = choose_rate(results), int(results.d_model.max())
    wide = results[[name for name in MEANING if name in results]]
    wide = wide.sel(learning_rate=rate, d_model=width, drop=True).sortby("depth")
    wide = wide.transpose("rule", "depth", "seed", "step")
    curves = {
        describe_value("rule", rule): {n: v.values for n, v in wide.sel(rule=rule).items()}
        for rule in wide.rule.values
    }
    fig = coordinates_figure(curves, wide.depth.values.tolist(), MEANING)
    fig.suptitle(f"width {width}, learning rate {rate:g}", fontsize=9)
    return fig


def fit_power(values: xr.DataArray) -> xr.DataArray:
    """Fits the power of the depth: the slope of ln values over ln depth."""
    return labelled.apply_along(
        partial(slope, np.log(values.depth.values)), np.log(values), "depth"
    )


def align_published(results: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Aligns mean |x_L| with figure 7's by step, rule and depth, at its rate; returns both.

    Without this rate both are empty.
    """
    rates = [rate for rate in results.learning_rate.values if rate == PUBLISHED_RATE]
    results = results.sel(learning_rate=rates)
    results = results.squeeze("learning_rate", drop=True) if rates else results.isel(step=slice(0))
    values = np.reshape(PUBLISHED, (2, 3, len(DEPTHS)))
    coordinates = {"step": [1, 10], "rule": ["mup", "half", "completep"], "depth": [*DEPTHS]}
    published = xr.DataArray(values, coordinates, [*coordinates])
    return xr.align(results.stream, published, join="inner", exclude=("d_model",))


def judge_claims(results: xr.Dataset, setup: Setup) -> Iterator[Row]:
    """Tests figure 7 where its depths are measured, and slopes over depth at step 10.

    Args:
        results: Over rule, rate, depth, width, seed and step.
        setup: Setup of one point; all points have the same text.
    """
    stream, published = align_published(results)
    if 256 in stream.d_model and stream.size:
        ratios = np.log(stream / published).sel(d_model=256, step=1, drop=True)
        yield from labelled.statement_rows("depth start", ratios)
    if stream.sizes["depth"] == len(DEPTHS):
        growth = fit_power(stream) - fit_power(published)
        for point, differences in labelled.iterate_points(growth, "seed", "d_model"):
            if published.sel(point).notnull().all():
                text = f"{setup.source}, {labelled.describe_point(point)}"
                yield from labelled.statement_rows("depth growth", differences, text)
    if results.sizes["depth"] < 2 or 10 not in results.step:
        return
    last, rules = results.sel(step=10, drop=True), set(results.rule.values)
    tokens, linear = (fit_power(last[name]) for name in ("residual_ratio", "linearisation"))
    for key, rule in (("depth tokens", "mup"), ("depth tokens completep", "completep")):
        if rule in rules:
            yield from labelled.statement_rows(key, tokens.sel(rule=rule, drop=True), setup.source)
    for key, values, other in (("depth linear", linear, "half"), ("depth cure", tokens, "mup")):
        if {other, "completep"} <= rules:
            difference = values.sel(rule="completep", drop=True) - values.sel(rule=other, drop=True)
            yield from labelled.statement_rows(key, difference, setup.source)


def compare_results(results: xr.Dataset) -> Iterator[Comparison]:
    """Compares mean |x_L| with figure 7, whose levels at step 10 depend on data and vocabulary.

    Also lists the power of the depth in the residual ratio at the last step, by rule and learning
    rate. The loss of the deepest network shows which rate a user would choose.
    """
    stream, published = align_published(results)
    if stream.size:
        note = "the published value is of width 256, digitised to 5 %"
        yield from labelled.compare_means("mean |x_L|", stream, published, note)
    if results.sizes["depth"] > 1:
        last, text = results.isel(step=-1, drop=True), f"at step {int(results.step[-1])}"
        power = fit_power(last.residual_ratio)
        yield from labelled.compare_means(f"power of the depth, residual ratio {text}", power)
        deepest = last.loss.sel(depth=results.depth.max(), drop=True)
        yield from labelled.compare_means(f"loss of the deepest network {text}", deepest)


EXPERIMENT = Experiment(
    order=75,
    title="Depth parametrisations",
    brief="ten steps of training with 2 to 64 layers: how the size of the states, the similarity "
    "of tokens and the gradients depend on depth under each depth rule",
    claim="A depth parametrisation is a rule that scales a network with its depth. The rule "
    "CompleteP multiplies each branch by depth^−α with α = 1. Under this rule, the mean size of "
    "the last states' entries after ten training steps is about the same at every depth. A rule "
    "that scales with the width alone lets this size grow with the depth (Dey et al. 2025, figure "
    "7). "
    "With α = ½, layers become linear in their weights as the depth grows. With α = 1 they do not "
    "(figure 6). No paper says whether deeper networks have more similar tokens.",
    presets={
        "quick": "--rule=mup,half,completep --depth=2,16 --num_seeds=3",
        "reported": {
            "bytes": f"--seed=3000 --rule=mup,half,completep {DEEP} --num_seeds=4 --d_model=256",
            "RTE": "--seed=3000 --rule=sp,mup,completep --depth=2,4,8,16,32 --num_seeds=4 "
            "--learning_rate=1e-4,3e-4,1e-3,3e-3 --text=data/RTE/train.tsv",
        },
        "tiny": "--num_seeds=2 --rule=mup,half,completep --depth=1,2 --d_model=8 --num_tokens=8 "
        "--batch_size=1 --steps=2 --base_depth=1",
    },
    figures=describe_figures(quantities_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_setup, identity) as run:
        for point in run.measure(measure, over=AXES):
            results, setup = point.results, point.setup
            point.save_table(make_rows(results))
            point.save_figure("quantities", quantities_figure, results)
            point.save_claims(judge_claims(results, setup))
            point.save_comparisons(compare_results(results))
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
