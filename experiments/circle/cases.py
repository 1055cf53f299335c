"""The networks of the circle experiment, and what is measured of one: its own continuation."""

from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.trained.training import Setup
from rank_collapse.network import entry, transformer
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.theory import recurrence
from rank_collapse.training.tasks import circle
from rank_collapse.training.training import Recipe, forward

# What the published code trains: a skip around the attention in each of them.
PUBLISHED = ("base", "circle_skip", "mlp")
# What the theory speaks of: the sublayers one by one, with and without a skip around the attention.
THEORY = ("attention", "attention+skip", "attention+mlp", "attention+skip+mlp")
COMPARED = {"published": PUBLISHED, "theory": THEORY, "all": (*PUBLISHED, *THEORY)}
WIDTHS = (32, 64, 128)
COLLAPSED_STEPS = 1000  # of equal tokens, to reach the fixed point near which a multiplier holds


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
        variants = COMPARED[options.compare]
        pairs = [(variant, width) for width in options.widths for variant in variants]
    return {name_of(*pair): setup(options, *pair) for pair in pairs}


def name_of(variant: str, width: int) -> str:
    """A case's name, "base, d=32"."""
    return f"{variant}, d={width}"


def parts_of(name: str) -> tuple[str, int]:
    """(variant, width) of a case's name."""
    variant, width = name.split(", d=")
    return variant, int(width)


def variant_of(options: flags.FlagValues) -> str:
    """The published variant that the two flags choose."""
    chosen = {"circle_skip": options.circle_skip, "mlp": options.do_mlp}
    return "+".join(name for name, wanted in chosen.items() if wanted) or "base"


def fed_with_sums(variant: str) -> bool:
    """Whether a skip leads around the recurrence."""
    return variant.startswith("circle_skip")


def setup(options: flags.FlagValues, variant: str, width: int) -> Setup:
    """One case: its network, and the walk it is trained on."""

    def make_data(_):
        walk = circle.make_examples(options.n_train_data)
        sums = circle.with_batch_before(walk, options.batch_sz)
        return {"train": sums if fed_with_sums(variant) else walk, "walk": walk}

    return Setup(
        name=f"circle: {name_of(variant, width)}",
        title=name_of(variant, width),
        recipe=recipe(options, variant, width),
        make_data=make_data,
        metrics={},
        published={},
    )


def recipe(options: flags.FlagValues, variant: str, width: int) -> Recipe:
    """What is trained: post-norm layers on linearly embedded points, no positions."""
    published = not variant.startswith("attention")
    config = TransformerConfig(
        depth=options.depth,
        num_heads=options.width,
        d_model=width,
        d_ff=width,
        mlp="gelu" if "mlp" in variant else "none",
        attention_skip=published or "skip" in variant,
        mlp_skip=True,
        norm_placement="post",
        init="reference",
        embedding=EmbeddingConfig(d_input=2, d_embed=width),
    )
    return Recipe(
        config, 2, options.batch_sz, options.n_epochs, loss="squared_error",
        output_dropout=published,
    )  # fmt: skip


def roll_out(num_steps: int, setup: Setup, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's continuation of its own output, after the points it was trained on.

    Returns:
        "trajectory" [t, 2, 2], "distance" [t] of its two points, and "error", √(E‖Δ‖² / 4) of one
        step on the training data, Δ the error of a point. Of the theory (see
        `rank_collapse.theory.recurrence`): "log10_distance" [t], with the logarithm carried;
        "head_gap" [t, l, h]; the Jacobians of a step of the recurrence, "jacobian_at_end" [4, 4]
        where the two points end, "jacobian_across" [2, 2] where equal points end that begin in
        their middle, and "equal_points_moved", the length of the last step of those.
    """
    config, skip = setup.recipe.config, fed_with_sums(setup.title)

    def step(points):
        return forward(model, points, config)

    def recurrent(points):
        return points + step(points) if skip else step(points)

    def weights(points):
        states = entry.input_states(model.network, points, config)
        return transformer.apply(model.network, states, config).attention

    walk, train = data["walk"], data["train"]
    squared = (jax.vmap(step)(train.inputs) - train.labels) ** 2
    path = circle.roll_out(step, walk.inputs[0], num_steps, skip=skip)
    inputs = jnp.cumsum(path, axis=0) if skip else path
    middle = jnp.mean(inputs[-1], axis=0)
    collapsed, moved = recurrence.equal_tokens(recurrent, middle, COLLAPSED_STEPS)
    return {
        "trajectory": path,
        "distance": circle.distance(path),
        "error": jnp.sqrt(0.5) * jnp.sqrt(jnp.mean(squared)),
        "log10_distance": recurrence.log_roll_out(
            model.network, model.classifier, walk.inputs[0], config, num_steps, skip=skip
        ),
        "head_gap": circle.head_gap(jax.lax.map(weights, inputs)),
        "jacobian_at_end": recurrence.jacobian_matrix(recurrent, inputs[-1]),
        "jacobian_across": recurrence.transverse_jacobian(recurrent, collapsed),
        "equal_points_moved": moved,
    }
