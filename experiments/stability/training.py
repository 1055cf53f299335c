"""The measurements of run_stability on networks while they train, as run_trainability trains them.

Its cells, its seeds and its task; what is measured at initialisation is measured at every look too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import run_trainability
from experiments.shell import cli
from experiments.stability import networks
from experiments.stability.measure import of_network
from experiments.stability.networks import ALONE
from experiments.trained import designs
from experiments.trained.designs import Cell, steps_of
from rank_collapse.measures import updates
from rank_collapse.network.inputs import input_states
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.statistics import geometric_mean, numbers
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training.recipe import Recipe, config_of
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import batch_forward


def trained(options: flags.FlagValues, run: RunFolder) -> dict[Cell, dict[str, Any]]:
    """{cell: what run_trainability measures of it, and `of_network`}, t looks: [s, t, ...]."""
    measure = partial(make_measure, size=options.update_size)
    own = training_options(options)
    return designs.train_cells(own, run_trainability.cells_of(own), run, make_measure=measure)


def training_options(options: flags.FlagValues) -> flags.FlagValues:
    """The flags of run_trainability for these networks; its own defaults for the rest."""
    given = {"designs": ",".join(options.train_designs), "depths": options.train_depth}
    given |= {"n_steps": options.train_steps, "seed": options.seed, "warmup": 0}
    given |= {"num_seeds": options.num_seeds, "num_devices": options.num_devices}
    if options.memory_gb is not None:
        given["memory_gb"] = options.memory_gb
    arguments = ["--parts=designs", *(f"--{name}={value}" for name, value in given.items())]
    return cli.parse(run_trainability.FLAGS, arguments)


def make_measure(recipe: Recipe, *, size: float) -> Callable[..., dict[str, Any]]:
    """measure(model, data, hyper, key) of one run: as run_trainability, and `of_network`, the mean
    over `LOOKED_AT` held-out examples.

    The update along the gradient is that of the held-out loss, the other one of a direction that is
    the same in all runs.
    """
    of_training = designs.make_measure(recipe)

    def measure(model, data, hyper, key):
        config, held_out = config_of(recipe, hyper), data["eval"]

        def loss(network):
            logits = batch_forward(model.replace(network=network), held_out, config)
            return examples.loss_metric(logits, held_out)

        gradients = networks.gradients(loss, model.network)
        leaves, tree = jax.tree.flatten(updates.matrices_of(model.network))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [jax.random.normal(k, w.shape) for k, w in zip(keys, leaves, strict=True)]
        direction = {ALONE: jax.tree.unflatten(tree, drawn)}

        def of_example(inputs):
            states = {ALONE: input_states(model.network, inputs, config)}
            expected, _ = networks.expected(model.network, states, config, size, gradients=False)
            return of_network(model.network, states, config, expected, gradients, direction, size)

        found = jax.lax.map(of_example, held_out.first(designs.LOOKED_AT).inputs)
        own = jax.tree.map(lambda a: a.mean(axis=0), found)
        return of_training(model, data, hyper, key) | {"stability": own}

    return measure


def curves_of(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Numbers of the whole network by step, [s, t].

    "apart": 1 − token cosine of the last layer, "expected_apart": the law's of the weights there
    are, "shares": Σ_i β_ii², "change_random", "change_gradient", "expected_change".
    """
    own = found["stability"]
    return {
        "apart": own["apart"][..., -1],
        "expected_apart": np.exp(own["expected_log_apart"][..., -1].astype(float)),
        "shares": own["shares"].sum(axis=-1),
        "change_random": own["change"]["random"],
        "change_gradient": own["change"]["gradient"],
        "expected_change": own["expected_change"],
    }


def summary_of(results: Mapping[Cell, dict[str, Any]], options: flags.FlagValues) -> dict[str, Any]:
    """{"training": per design who failed, and the curves' geometric means over seeds}, if any."""
    if not results:
        return {}
    limit, found_of = designs.limit_of(training_options(options)), {}
    for cell, found in results.items():
        means = {name: geometric_mean(curve) for name, curve in curves_of(found).items()}
        found_of[cell.design] = {
            "failed": int(designs.failed(found, limit).sum()),
            "accuracy": found["accuracy"].mean(axis=0).tolist(),
        } | {name: numbers(mean) for name, mean in means.items()}
    steps = steps_of(next(iter(results.values()))).tolist()
    return {"training": {"depth": options.train_depth, "steps": steps, "designs": found_of}}


@figures.styled
def training_figure(results: Mapping[Cell, Any], setup: Any) -> Figure:
    """The same measurements on the networks of run_trainability while they train, by step; dotted
    what the law expects of the weights there are."""
    fig, axes = figures.figure(2, 3, width=3.9, height=2.8, sharex=True)
    labels = {
        "apart": r"1 $-$ token cosine, last layer",
        "shares": r"$\sum_i \beta_{ii}^2$",
        "change_random": r"$E|\delta \hat x|^2/d$, random update",
        "change_gradient": r"$E|\delta \hat x|^2/d$, along the gradient",
        "w_q": r"$\|\partial W_Q\|_F$, all layers",
        "w_v": r"$\|\partial W_V\|_F$, all layers",
    }
    law = {"apart": "expected_apart", "change_random": "expected_change"}
    for index, (cell, found) in enumerate(results.items()):
        curves, steps = curves_of(found), steps_of(found)
        for name in ("w_q", "w_v"):
            curves[name] = np.sqrt(np.mean(designs.gradient(found, name) ** 2, axis=-1))
        for ax, (name, label) in zip(axes.flat, labels.items(), strict=True):
            figures.log_band(ax, steps, curves[name], cell.design, index)
            if name in law:
                expected = geometric_mean(curves[law[name]])
                ax.plot(steps, expected, color=figures.color(index), ls=":", lw=1.2)
            ax.set(yscale="log", ylabel=label)
    figures.outer_labels(axes, "step")
    axes[0, 0].legend()
    fig.suptitle(
        f"{next(iter(results)).depth} layers, training; dotted: the law of the weights then"
    )
    return fig
