"""Width against depth at equal parameters: the sorting task on networks of one size.

The published code's `test_width` compares a shallow, wide network with a deep, narrow one of about
as many parameters (Dong, Cordonnier and Loukas 2021, its appendix). Here every requested
depth gets the width with the number of parameters nearest to that of the reference network.

    python -m experiments.run_width --depths=1,2,4,8

Two CPU cores: 142 seconds with --num_seeds=5 and the default depths. Expected: 0.985 of the letters
right at depth 1, 0.995 at depth 12.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.lab import cli, vocabulary
from experiments.lab.experiment import Experiment, Shown, name_figures, open_run
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.train import arguments
from experiments.train.sorting import sorting_setup
from experiments.train.training import (
    TrainedTask,
    diverged,
    kept,
    model_files,
    results_of,
    whole_model,
)
from experiments.verdicts import Comparison
from experiments.verdicts.claims import mean_row
from experiments.verdicts.statistics import seed_rows
from rank_collapse.report import figures
from rank_collapse.training import Recipe, init_model

FLAGS = arguments.make_flags("width", shows="accuracy", no_repeat=False)
vocabulary.define_numbers(
    FLAGS,
    "depths",
    [1, 2, 4, 6, 12],
    "Depths to compare, each with as many parameters as --depth and --d_model give.",
    lower_bound=1,
)

Cases = Mapping[str, TrainedTask]  # {"depth L": what is trained}
ByCase = Mapping[str, Any]  # {case: as `training.results_of`}


def make_cases(options: flags.FlagValues) -> Cases:
    """{"depth L": what is trained} of every depth, with about the reference's parameters."""
    setup = sorting_setup(options)
    target = num_parameters(setup.recipe)
    return {
        f"depth {depth}": dataclasses.replace(
            setup, name=f"depth {depth}", recipe=sized(setup.recipe, depth, target)
        )
        for depth in options.depths
    }


def num_parameters(recipe: Recipe) -> int:
    """Numbers in a recipe's model, embedding and classifier included."""
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), recipe))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def sized(recipe: Recipe, depth: int, target: int) -> Recipe:
    """The recipe at a depth, with the multiple of its heads as width that comes nearest."""

    def at(heads):
        width = heads * recipe.config.num_heads
        embedding = recipe.config.embedding.replace(d_embed=width)
        fields = {"depth": depth, "d_model": width, "d_ff": width, "embedding": embedding}
        return dataclasses.replace(recipe, config=recipe.config.replace(**fields))

    # A layer has more than d² parameters.
    most = math.isqrt(target) // recipe.config.num_heads + 1
    below = bisect.bisect(range(1, most + 1), target, key=lambda k: num_parameters(at(k)))
    nearest = (at(heads) for heads in (max(below, 1), below + 1))
    return min(nearest, key=lambda r: abs(num_parameters(r) - target))


def rows_of(results: ByCase, cases: Cases) -> list[dict[str, Any]]:
    """One row per depth and seed."""
    return [
        shape_of(case) | row
        for name, case in cases.items()
        for row in seed_rows({"diverged": diverged(results[name])} | results[name]["whole"])
    ]


def shape_of(case: TrainedTask) -> dict[str, int]:
    """Depth, width and number of parameters of a network."""
    config, parameters = case.recipe.config, num_parameters(case.recipe)
    return {"depth": config.depth, "hidden_dim": config.d_model, "parameters": parameters}


def accuracies(results, cases) -> dict[str, np.ndarray]:
    """{case: accuracy [s], NaN of a seed that diverged}, shallow first."""
    return {
        name: np.where(diverged(results[name]), np.nan, results[name]["whole"]["accuracy"])
        for name in sorted(cases, key=lambda name: cases[name].recipe.config.depth)
    }


def width_figure(results, cases):
    """Left: training loss, mean and standard deviation over seeds. Right: accuracy against depth,
    the width chosen so that the number of parameters stays."""
    fig, ((loss, accuracy),) = figures.figure(1, 2)
    found = accuracies(results, cases)
    configs = [cases[name].recipe.config for name in found]
    for index, (name, config) in enumerate(zip(found, configs, strict=True)):
        losses = results[name]["losses"][kept(results[name])]
        label = f"{config.depth} layer{'s' * (config.depth > 1)}, width {config.d_model}"
        figures.log_band(loss, 1 + np.arange(losses.shape[1]), losses, label, index, marker="")
    loss.set(xlabel="epoch", ylabel="training loss", yscale="log")
    loss.legend()
    # A seed may diverge at one depth only: NaN is left out of the mean.
    values = np.stack(list(found.values()), axis=1)
    depths = [config.depth for config in configs]
    figures.band(accuracy, depths, values)
    accuracy.set(xlabel="layers, at equal parameters", ylabel="token accuracy", xticks=depths)
    return fig


def claims(results, cases):
    """The deepest network less the shallowest, on the same data seed by seed: a finding."""
    found = accuracies(results, cases)
    shallow, *_, deep = [*found, *found]  # of one depth: twice the same
    where = "{} layers and {}".format(*(cases[n].recipe.config.depth for n in (deep, shallow)))
    return [mean_row("width", where, found[deep] - found[shallow])]


def compare(results, cases):
    """Accuracy by depth; no number is published."""
    for name, accuracy in accuracies(results, cases).items():
        shape, known = shape_of(cases[name]), accuracy[np.isfinite(accuracy)]
        yield Comparison(
            f"token accuracy at depth {shape['depth']}, width {shape['hidden_dim']}",
            float(known.mean()),
            note=f"standard deviation {known.std():.3f} over {len(known)} seeds; "
            f"{shape['parameters']} parameters",
        )


EXPERIMENT = Experiment(
    order=90,
    title="Width against depth",
    brief="sorting with width against depth at equal parameters",
    claim="The published code (`test_width`) sets a shallow, wide network beside a deep, narrow "
    "one of about as many parameters, on sorting; it gives no number. If short paths carry a "
    "trained network, as section 4.2 says, depth should buy little at equal parameters.",
    presets={
        "quick": "--depths=1,3 --depth=3 --d_model=32 --num_seeds=4 --n_epochs=12 --n_eval_data=60",
        "paper": "--num_seeds=5",
        "tiny": f"{arguments.TINY} --depths=2",
    },
)
FIGURES = name_figures(width_figure)


def measure(options: Flags, cases: Cases, run: RunFolder) -> ByCase:
    """Trains every depth, and takes the accuracy of each seed."""
    return results_of(options, cases, run, whole_model)


def main(options: Flags) -> Shown:
    """Measures what the run lacks, and shows it."""
    with open_run(options, make_cases) as run:
        points = run.measure(measure)
        return run.publish(
            points,
            table=rows_of,
            figures=FIGURES,
            claims=claims,
            compare=compare,
            files=model_files,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
