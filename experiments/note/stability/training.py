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
from experiments.note.stability import networks
from experiments.note.stability.measure import of_network
from experiments.train import designs, letters
from experiments.train.designs import Cell, steps_of
from experiments.verdicts import Comparison
from rank_collapse.network.inputs import input_states
from rank_collapse.network.measured import updates
from rank_collapse.report import figures
from rank_collapse.report.figures import Figure
from rank_collapse.report.intervals import geometric_mean
from rank_collapse.training.recipe import Recipe, run_config
from rank_collapse.training.tasks import examples
from rank_collapse.training.training import batch_forward


def trained(options: Flags, run: RunFolder) -> dict[Cell, dict[str, Any]]:
    """{cell: what run_trainability measures of it, and `of_network`}, t looks: [s, t, ...]."""
    own = {name: options[name].value for name in ("seed", "num_seeds", "num_devices", "seed_chunk")}
    own |= {"n_steps": options.train_steps}
    arguments = [f"--{name}={value}" for name, value in own.items() if value is not None]
    sizes = cli.parse_flags(letters.make_flags(), arguments)
    cells = [
        Cell(options.train_depth, name, sizes.learning_rate, 0, sizes.batch_size)
        for name in options.train_designs
    ]
    measure = partial(make_measure, size=options.update_size)
    return designs.train_cells(sizes, lambda _: cells, run, make_measure=measure)


def make_measure(recipe: Recipe, *, size: float) -> Callable[..., dict[str, Any]]:
    """measure(model, data, hyper, key) of one run: as run_trainability, and `of_network`, the mean
    over `LOOKED_AT` held-out examples.

    The update along the gradient is that of the held-out loss, the other one of a direction that is
    the same in all runs.
    """
    of_training = designs.make_measure(recipe)

    def measure(model, data, hyper, key):
        config, held_out = run_config(recipe, hyper), data["eval"]

        def loss(network):
            logits = batch_forward(model.replace(network=network), held_out, config)
            return examples.loss_metric(logits, held_out), None

        gradients, _ = networks.gradients(loss, model.network)
        leaves, tree = jax.tree.flatten(updates.get_weight_matrices(model.network))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [jax.random.normal(k, w.shape) for k, w in zip(keys, leaves, strict=True)]
        random, down = jax.tree.unflatten(tree, drawn), jax.tree.map(jax.numpy.negative, gradients)
        moves = {"random": random, "gradient": down}

        def of_example(inputs):
            states = input_states(model.network, inputs, config)
            law = networks.expected(model.network, states, config, size)
            trace = rc.apply(model.network, states, config)
            return of_network(model.network, states, config, trace, law, moves, size)

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


def compare(results: Mapping[Cell, Any]) -> Iterator[Comparison]:
    """The curves beside the law's, geometric means over seeds, and who fails."""
    for cell, found in results.items():
        means = {name: geometric_mean(values) for name, values in curves_of(found).items()}
        shown = {n: ", ".join(f"{v[i]:.2g}" for i in (0, 1, -1)) for n, v in means.items()}
        steps = ", ".join(f"{steps_of(found)[i]:g}" for i in (0, 1, -1))
        yield Comparison(
            f"{cell.design}, {cell.depth} layers trained: 1 − token cosine of the last at steps "
            f"{steps}",
            shown["apart"],
            shown["expected_apart"],
            "beside it the law's, of the weights at that step; output change by a random update "
            f"{shown['change_random']}, the law's {shown['expected_change']}; "
            f"{found['failed'].sum()} seeds fail",
        )


def training_figure(found: Mapping[str, Any], setup: Any) -> Figure | None:
    """The same measurements on the networks of run_trainability while they train, by step; dotted
    what the law expects of the weights there are."""
    results = found["trained"]
    if not results:
        return None
    fig, axes = figures.figure(2, 2, width=3.9, height=2.8, sharex=True)
    labels = {
        "apart": r"1 $-$ token cosine, last layer",
        "shares": r"$\sum_i \beta_{ii}^2$",
        "change_random": r"$E|\delta \hat x|^2/d$, random update",
        "change_gradient": r"$E|\delta \hat x|^2/d$, along the gradient",
    }
    law = {"apart": "expected_apart", "change_random": "expected_change"}
    for index, (cell, trained) in enumerate(results.items()):
        curves, steps = curves_of(trained), steps_of(trained)
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
