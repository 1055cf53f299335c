"""The networks of the width experiment: one number of parameters, several depths."""

import dataclasses
from typing import Any

import jax
from absl import flags

from experiments import run_sort
from experiments.trained.training import Setup
from rank_collapse.training import path_accuracy
from rank_collapse.training.training import Recipe, init_model


def make_cases(options: flags.FlagValues) -> dict[str, Setup]:
    """{"depth L": what is trained} of every depth, with about the reference's parameters."""
    setup = run_sort.make_setup(options)
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

    def at(width):
        embedding = recipe.config.embedding.replace(d_embed=width)
        fields = {"depth": depth, "d_model": width, "d_ff": width, "embedding": embedding}
        return dataclasses.replace(recipe, config=recipe.config.replace(**fields))

    step = recipe.config.num_heads
    low, high = 1, 2  # in steps: the width is sought between them, and there may be millions
    while num_parameters(at(high * step)) <= target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_parameters(at(middle * step)) <= target else (low, middle)
    return min((at(low * step), at(high * step)), key=lambda r: abs(num_parameters(r) - target))


def whole_model(setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's metrics: {"whole": {metric: []}}."""
    config, metrics = setup.recipe.config, setup.metrics
    return {"whole": path_accuracy.whole_model(model, data["eval"], config, metrics)}
