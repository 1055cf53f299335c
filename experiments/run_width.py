"""Width against depth at equal parameters: the sorting task on networks of one size.

The published code's `test_width` compares a shallow, wide network with a deep, narrow network that
has about the same number of parameters (Dong, Cordonnier and Loukas 2021, appendix). Here every
depth gets the width whose number of parameters is nearest to the reference network.

    python -m experiments.run_width --depths=1,2,4,8

Takes 142 seconds with --num_seeds=5 and the default depths on two cores. Expect nearly all letters
to be right at any depth.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jaxtyping import PyTree

from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Run,
    RunFolder,
    cli,
    describe_figures,
    open_run,
    shared_flags,
)
from experiments.lab.executor import nest_arrays
from experiments.train import arguments
from experiments.train.sorting import make_sorting_task
from experiments.train.train_networks import save_models, train_networks
from experiments.train.trained_tasks import (
    TrainedTask,
    diverged_seeds,
    fine_seeds,
    measure_whole,
)
from experiments.verdicts import Comparison, Row, TableRow, make_row, seed_rows
from rank_collapse.report import figures
from rank_collapse.training import Recipe, init_model

FLAGS = arguments.make_flags(
    "width",
    shows="accuracy",
    depth=6,
    num_heads=2,
    d_model=48,
    num_tokens=8,
    num_labels=10,
    n_train_data=1000,
    n_eval_data=200,
    n_epochs=65,
    batch_size=30,
    learning_rate=1e-3,
    weight_decay=0.0,
    dropout=0.1,
    no_repeat=False,
)
shared_flags.define_numbers(
    FLAGS,
    "depths",
    [1, 2, 4, 6, 12],
    "Depths to compare, each with as many parameters as --depth and --d_model give.",
    lower_bound=1,
)

Cases = Mapping[str, TrainedTask]  # {"depth L": what is trained}
ByCase = Mapping[
    str, dict[str, PyTree[np.ndarray]]
]  # {case: nested, as `train_networks` names its arrays}


def make_cases(options: Options) -> Cases:
    """Makes the training task of every depth, with about the reference's number of parameters.

    Args:
        options: The flags.
    """
    setup = make_sorting_task(options)
    target = num_parameters(setup.recipe)
    return {
        f"depth {depth}": dataclasses.replace(
            setup, name=f"depth {depth}", recipe=resize(setup.recipe, depth, target)
        )
        for depth in options.depths
    }


@functools.lru_cache(maxsize=256)
def num_parameters(recipe: Recipe) -> int:
    """Counts the parameters of a recipe's model, including embedding and classifier."""
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), recipe))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def resize(recipe: Recipe, depth: int, target: int) -> Recipe:
    """Gives a recipe a depth, and as width the multiple of its heads that comes nearest to a number
    of parameters.

    Args:
        recipe: Recipe of the reference.
        depth: The new one.
        target: Number of parameters to approach.
    """

    def set_width(multiple):
        """Makes the recipe with `multiple` features in each head."""
        width = multiple * recipe.config.num_heads
        embedding = recipe.config.embedding.replace(d_embed=width)
        fields = {"depth": depth, "d_model": width, "d_ff": width, "embedding": embedding}
        return dataclasses.replace(recipe, config=recipe.config.replace(**fields))

    # A layer has more than d² parameters.
    most = math.isqrt(target) // recipe.config.num_heads + 1
    counts = range(1, most + 1)
    below = bisect.bisect(counts, target, key=lambda k: num_parameters(set_width(k)))
    candidates = [set_width(multiple) for multiple in (max(below, 1), below + 1)]
    return min(candidates, key=lambda candidate: abs(num_parameters(candidate) - target))


def measure(options: Options, cases: Cases, folder: RunFolder) -> ByCase:
    """Trains every depth, and measures the accuracy of each seed."""
    arrays = train_networks(options, cases, folder, measure_whole)
    return {name: nest_arrays(case) for name, case in arrays.items()}


def make_rows(results: ByCase, cases: Cases) -> Iterator[TableRow]:
    """Makes a row for each depth and seed."""
    for name, case in cases.items():
        diverged = {"diverged": diverged_seeds(results[name])}
        for row in seed_rows(diverged | results[name]["whole"]):
            yield describe_shape(case) | row


def describe_shape(case: TrainedTask) -> dict[str, int]:
    """Returns depth, width and number of parameters of a network."""
    config, parameters = case.recipe.config, num_parameters(case.recipe)
    return {"depth": config.depth, "hidden_dim": config.d_model, "parameters": parameters}


def case_accuracies(results: ByCase, cases: Cases) -> dict[str, np.ndarray]:
    """Selects the accuracy of each case [s], NaN for a seed that diverged, shallow networks
    first."""
    return {
        name: np.where(diverged_seeds(results[name]), np.nan, results[name]["whole"]["accuracy"])
        for name in sorted(cases, key=lambda name: cases[name].recipe.config.depth)
    }


@figures.styled
def width_figure(results: ByCase, cases: Cases):
    """Left: training loss (vertical axis) by epoch (horizontal axis); each colour is one network.
    Right: share of correct letters (vertical axis) by the number of layers (horizontal axis).
    Networks with more layers are narrower, so that all networks have about the same number of
    parameters. Lines are means over seeds (geometric means on the left), and bands are one standard
    deviation."""
    accuracies = case_accuracies(results, cases)
    if not all(results[name]["losses"].size for name in accuracies):  # no epoch
        return None
    fig, ((loss, accuracy),) = figures.figure(1, 2)
    configs = [cases[name].recipe.config for name in accuracies]
    for index, (name, config) in enumerate(zip(accuracies, configs, strict=True)):
        losses = results[name]["losses"][fine_seeds(results[name])]
        label = f"{config.depth} layer{'s' * (config.depth > 1)}, width {config.d_model}"
        figures.log_band(loss, 1 + np.arange(losses.shape[1]), losses, label, index, marker="")
    loss.set(xlabel="epoch", ylabel="training loss", yscale="log")
    figures.integer_ticks(loss)
    loss.legend()
    # A seed may diverge at one depth only: NaN is left out of the mean.
    depths = [config.depth for config in configs]
    figures.band(accuracy, depths, np.stack(list(accuracies.values()), axis=1))
    accuracy.set(xlabel="layers, at equal parameters", ylabel="token accuracy", xticks=depths)
    return fig


def judge_claims(results: ByCase, cases: Cases) -> list[Row]:
    """The statistic is the accuracy of the deepest network minus that of the shallowest, on the
    same data, seed by seed."""
    accuracies = case_accuracies(results, cases)
    names = sorted(accuracies, key=lambda name: cases[name].recipe.config.depth)
    shallow, deep = names[0], names[-1]
    text = "{} layers and {}".format(*(cases[n].recipe.config.depth for n in (deep, shallow)))
    return [make_row("width", text, accuracies[deep] - accuracies[shallow])]


def compare_results(results: ByCase, cases: Cases) -> Iterator[Comparison]:
    """Lists the accuracy by depth; no number is published.

    Args:
        results: {case: arrays of all seeds [s, ...]}.
        cases: Training tasks by case.
    """
    for name, accuracy in case_accuracies(results, cases).items():
        shape, numbers = describe_shape(cases[name]), accuracy[np.isfinite(accuracy)]
        yield Comparison(
            f"token accuracy at depth {shape['depth']}, width {shape['hidden_dim']}",
            float(numbers.mean()),
            note=f"standard deviation {numbers.std():.3f} over {len(numbers)} seeds; "
            f"{shape['parameters']} parameters",
        )


EXPERIMENT = Experiment(
    order=90,
    title="Width against depth",
    brief="sorting with wide and with deep networks that have the same number of parameters",
    claim="The published code (`test_width`) compares two networks that sort. One network is "
    "shallow and wide, and the other is deep and narrow. Both have about the same number of "
    "parameters. The paper gives no number for this comparison. It says that trained networks "
    "work mainly through short paths (section 4.2). If so, more layers with the same number of "
    "parameters should help little.",
    presets={
        "quick": "--depths=1,3 --depth=3 --d_model=32 --num_seeds=4 --n_epochs=12 --n_eval_data=60",
        "reported": "--seed=3000 --num_seeds=4 --depths=1,12",
        "tiny": f"{arguments.TINY} --depths=2",
    },
    figures=describe_figures(width_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_cases) as run:
        for point in run.measure(measure):
            results, cases = point.results, point.setup
            point.save_table(make_rows(results, cases))
            point.save_figure("width", width_figure, results, cases)
            point.save_claims(judge_claims(results, cases))
            point.save_comparisons(compare_results(results, cases))
            save_models(point, cases)
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
