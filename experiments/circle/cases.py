"""The networks of the circle experiment, and what is measured of one: its own continuation."""

from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.trained.training import Setup
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.training.tasks import circle
from rank_collapse.training.training import Recipe, forward

VARIANTS = ("attention", "skip", "mlp", "skip+mlp")
WIDTHS = (32, 64, 128)


def make_cases(options: flags.FlagValues) -> dict[str, Setup]:
    """{"variant, width": what is trained} of the flags.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    if options.num_labels != 2:
        raise ValueError(f"num_labels={options.num_labels}: a point of the plane has 2 coordinates")
    if options.n_train_data < 4:
        raise ValueError(f"n_train_data={options.n_train_data} points make no two walks")
    pairs = [(variant_of(options), options.hidden_dim)]
    if options.compare:
        pairs = [(variant, width) for width in options.widths for variant in VARIANTS]
    return {
        f"{variant}, d={width}": Setup(
            name=f"circle: {variant}, d={width}",
            title=f"{variant}, d={width}",
            recipe=recipe(options, variant, width),
            make_data=lambda key: {"train": circle.make_examples(options.n_train_data)},
            metrics={},
            published={},
        )
        for variant, width in pairs
    }


def variant_of(options: flags.FlagValues) -> str:
    """The variant that the two flags choose; both together are skip and MLP."""
    chosen = {"skip": options.circle_skip, "mlp": options.do_mlp}
    return "+".join(name for name, wanted in chosen.items() if wanted) or "attention"


def recipe(options: flags.FlagValues, variant: str, width: int) -> Recipe:
    """What is trained: post-norm layers on linearly embedded points, no positions."""
    config = TransformerConfig(
        depth=options.depth,
        num_heads=options.width,
        d_model=width,
        d_ff=width,
        mlp="gelu" if "mlp" in variant else "none",
        attention_skip="skip" in variant,
        mlp_skip=True,
        norm_placement="post",
        init="reference",
        embedding=EmbeddingConfig(d_input=2, d_embed=width),
    )
    return Recipe(config, 2, options.batch_sz, options.n_epochs, loss="squared_error")


def roll_out(num_steps: int, setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's continuation of its own output, after the points it was trained on.

    Returns:
        "trajectory" [t, 2, 2], "distance" [t] of its two points, and "error", √(E‖Δ‖² / 4) of one
        step on the training data, Δ the error of a point.
    """

    def step(points):
        return forward(model, points, setup.recipe.config)

    walk = data["train"]
    squared = (jax.vmap(step)(walk.inputs) - walk.labels) ** 2
    error = jnp.sqrt(0.5) * jnp.sqrt(jnp.mean(squared))
    path = circle.roll_out(step, walk.inputs[0], num_steps)
    return {"trajectory": path, "distance": circle.distance(path), "error": error}
