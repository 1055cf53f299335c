"""The measurements of run_stability on networks while they train, as run_trainability trains them.

Its cells, its seeds and its task; what is measured at initialisation is measured at every look too.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

import rank_collapse as rc
from experiments.lab import cli
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.note.stability import measure as stability
from experiments.train import designs
from experiments.train.designs import Cell, look_steps
from experiments.verdicts import Comparison
from rank_collapse.network.inputs import input_states
from rank_collapse.network.measured import updates
from rank_collapse.report import figures
from rank_collapse.report.intervals import geometric_mean
from rank_collapse.training.recipe import Recipe, run_config
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import batch_forward


def train_networks(options: Flags, run: RunFolder) -> dict[Cell, dict[str, Any]]:
    """Trains the networks of the flags, and measures them as run_trainability and `measure_network`
    do.

    Args:
        options: The flags of run_stability.
        run: The run folder.

    Returns:
        {cell: {measure: [s, t, ...]}}, t looks.
    """
    names = ("seed", "num_seeds", "num_devices", "seed_chunk")
    sizes = {name: options[name].value for name in names} | {"n_steps": options.train_steps}
    arguments = [f"--{name}={value}" for name, value in sizes.items() if value is not None]
    task_options = cli.parse_flags(designs.make_flags(), arguments)
    cells = [
        Cell(options.train_depth, name, task_options.learning_rate, 0, task_options.batch_size)
        for name in options.train_designs
    ]
    measure = partial(make_measure, size=options.update_size)
    return designs.train_cells(task_options, lambda _: cells, run, make_measure=measure)


def make_measure(recipe: Recipe, *, size: float) -> Callable[..., dict[str, Any]]:
    """Makes measure(model, data, hyper, key) of one run.

    It measures what run_trainability does, and "stability": `measure_network`, the mean over
    `NUM_MEASURED` held-out examples. The update along the gradient is that of the held-out loss,
    the other one of a direction that is the same in all runs.

    Args:
        recipe: What is trained.
        size: ‖W* − W‖/‖W‖ of the updates.
    """
    measure_training = designs.make_measure(recipe)

    def measure(model, data, hyper, key):
        config, held_out = run_config(recipe, hyper), data["eval"]

        def loss(network):
            logits = batch_forward(model.replace(network=network), held_out, config)
            return examples.loss_metric(logits, held_out), None

        gradients, _ = stability.matrix_gradients(loss, model.network)
        leaves, tree = jax.tree.flatten(updates.get_weight_matrices(model.network))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        normals = [jax.random.normal(k, w.shape) for k, w in zip(keys, leaves, strict=True)]
        moves = {
            "random": jax.tree.unflatten(tree, normals),
            "gradient": jax.tree.map(jax.numpy.negative, gradients),
        }

        def measure_example(inputs):
            states = input_states(model.network, inputs, config)
            law = stability.expect_pass(model.network, states, config, size)
            trace = rc.apply(model.network, states, config)
            return stability.measure_network(model.network, states, config, trace, law, moves, size)

        measures = jax.lax.map(measure_example, held_out.first(designs.NUM_MEASURED).inputs)
        means = jax.tree.map(lambda a: a.mean(axis=0), measures)
        return measure_training(model, data, hyper, key) | {"stability": means}

    return measure


def step_curves(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Computes numbers of the whole network by step, [s, t].

    "apart": 1 − token cosine of the last layer, "expected_apart": the law's of the weights there
    are, "shares": Σ_i β_ii², "change_random", "change_gradient", "expected_change".

    Args:
        results: Of one cell.
    """
    measures = results["stability"]
    return {
        "apart": measures["apart"][..., -1],
        "expected_apart": np.exp(measures["expected_log_apart"][..., -1].astype(float)),
        "shares": measures["shares"].sum(axis=-1),
        "change_random": measures["change"]["random"],
        "change_gradient": measures["change"]["gradient"],
        "expected_change": measures["expected_change"],
    }


def compare_results(results: Mapping[Cell, Any]) -> Iterator[Comparison]:
    """Compares the curves with the law's, geometric means over seeds, and says who fails.

    Args:
        results: What was measured of each cell.
    """
    for cell, cell_results in results.items():
        means = {name: geometric_mean(values) for name, values in step_curves(cell_results).items()}
        texts = {n: ", ".join(f"{v[i]:.2g}" for i in (0, 1, -1)) for n, v in means.items()}
        steps = ", ".join(f"{look_steps(cell_results)[i]:g}" for i in (0, 1, -1))
        yield Comparison(
            f"{cell.design}, {cell.depth} layers trained: 1 − token cosine of the last at steps "
            f"{steps}",
            texts["apart"],
            texts["expected_apart"],
            "beside it the law's, of the weights at that step; output change by a random update "
            f"{texts['change_random']}, the law's {texts['expected_change']}; "
            f"{cell_results['failed'].sum()} seeds fail",
        )


def training_figure(results: Mapping[str, Any], setup: Any) -> figures.Figure | None:
    """The same measurements on the networks of run_trainability while they train, by step; dotted
    what the law expects of the weights there are."""
    cells = results["trained"]
    if not cells:
        return None
    fig, axes = figures.figure(2, 2, width=3.9, height=2.8, sharex=True)
    labels = {
        "apart": r"1 $-$ token cosine, last layer",
        "shares": r"$\sum_i \beta_{ii}^2$",
        "change_random": r"$E|\delta \hat x|^2/d$, random update",
        "change_gradient": r"$E|\delta \hat x|^2/d$, along the gradient",
    }
    expectations = {"apart": "expected_apart", "change_random": "expected_change"}
    for index, (cell, train_networks) in enumerate(cells.items()):
        curves, steps = step_curves(train_networks), look_steps(train_networks)
        for ax, (name, label) in zip(axes.flat, labels.items(), strict=True):
            figures.log_band(ax, steps, curves[name], cell.design, index)
            if name in expectations:
                expected = geometric_mean(curves[expectations[name]])
                ax.plot(steps, expected, color=figures.color(index), ls=":", lw=1.2)
            ax.set(yscale="log", ylabel=label)
    figures.outer_labels(axes, "step")
    axes[0, 0].legend()
    fig.suptitle(f"{next(iter(cells)).depth} layers, training; dotted: the law of the weights then")
    return fig
