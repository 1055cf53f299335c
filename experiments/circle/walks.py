"""The circle's networks: two walkers, their training examples, and walks fed with their own output.

Each example is a sequence of two tokens, the current points of two walkers on the two halves of a
circle; the targets are their next points. Applied to its own output again and again, a network may
let the two points fall together: `experiments.circle.recurrence` says how fast.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import rank_collapse as rc
from experiments.circle import recurrence
from experiments.lab import Options
from experiments.train.trained_tasks import TrainedTask, diverged_seeds, fine_seeds
from rank_collapse.network.inputs import input_states
from rank_collapse.training import Recipe, forward
from rank_collapse.training.models import Model
from rank_collapse.training.tasks.examples import Examples

RADIUS = 0.3
COLLAPSED_STEPS = 1000  # of equal tokens, to reach the fixed point near which a multiplier holds
TOGETHER = 0.01  # two points this near have fallen together: 1/60 of the circle's diameter
HIGH, LOW = 1e-2, 1e-6  # distances between which the steps of a fall are counted
SUMS = ", sums"  # in the name of a program that is fed with sums
AT_REST = 1e-5  # equal points that move less in a step are at a fixed point

# How often the published code itself lets the two walkers fall nearer than `TOGETHER`: its three
# commands at three widths, with --seed 1 to 8.
PUBLISHED_SEEDS = 8
PUBLISHED_FELL = {
    ("base", 32): 1,
    ("base", 64): 3,
    ("base", 128): 1,
    ("circle_skip", 32): 0,
    ("circle_skip", 64): 0,
    ("circle_skip", 128): 0,
    ("mlp", 32): 2,
    ("mlp", 64): 1,
    ("mlp", 128): 2,
}


def make_examples(num_points: int, radius: float = RADIUS) -> Examples:
    """Makes (points t of both halves → points t + 1), t = 0 .. num_points/2 − 2, anticlockwise.

    Args:
        num_points: Points of the whole circle.
        radius: Radius of the circle.

    Raises:
        ValueError: Fewer than four points.

    Source: Dong et al. 2021, section 4.3.
    """
    half = num_points // 2
    if half < 2:
        raise ValueError(f"num_points={num_points} leaves no step on either half of the circle")
    angle = 2 * jnp.pi * jnp.arange(num_points) / num_points
    points = radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # The published code starts the second walker one point early, which keeps both in their half.
    steps = half - 1
    first, second = points[:half], points[steps : steps + half]
    walk = jnp.stack([first, second], axis=1)
    return Examples(inputs=walk[:-1], labels=walk[1:])


def add_batch_before(examples: Examples, batch_size: int) -> Examples:
    """Adds the inputs of the batch before, zeros before the first; labels stay as they are.

    circle_skip of the published code trains on these examples: a skip around the recurrence, from
    the true points instead of its own output.
    """
    x = examples.inputs
    before = jnp.concatenate([jnp.zeros_like(x[:batch_size]), x])[: len(x)]
    return examples.replace(inputs=x + before)


def split_name(name: str) -> tuple[str, int]:
    """Splits a case's name, "base, d=32", into variant and width."""
    variant, width = name.split(", d=")
    return variant, int(width)


def make_case(options: Options, name: str) -> TrainedTask:
    """Makes one case of the circle task: its network, and the walk that it is trained on.

    The network has post-norm layers on linearly embedded points, and no positions. A network
    without a skip around its attention has a skip of gain 0, and a network without dropout on its
    output multiplies the rate there by 0, so cases that differ only in these share one compiled
    program. Names that begin with "attention" are our variants; the others are those of the
    published code, and "circle_skip" is trained on sums of two batches (`add_batch_before`).

    Args:
        options: The flags.
        name: Variant and width, in the form of `split_name`.
    """
    variant, width = split_name(name)
    is_published = not variant.startswith("attention")
    is_summed = variant.startswith("circle_skip")  # a skip around the recurrence
    config = rc.TransformerConfig(
        depth=options.depth,
        num_heads=options.num_heads,
        d_model=width,
        d_ff=width,
        mlp="gelu" if "mlp" in variant else "none",
        mlp_skip=True,
        norm_placement="post",
        attention_skip=True,
        init="reference",
        embedding=rc.EmbeddingConfig(d_input=2, d_embed=width),
    )
    recipe = Recipe(
        config,
        2,
        options.batch_size,
        options.n_epochs,
        loss="squared_error",
        output_dropout=True,
    )

    def make_data(_):
        """Makes the examples of a seed: the walk, and what the network is trained on."""
        walk = make_examples(options.n_train_data)
        summed = add_batch_before(walk, options.batch_size)
        return {"train": summed if is_summed else walk, "walk": walk}

    skip = np.float32(is_published or "skip" in variant)
    return TrainedTask(
        options,
        "circle",
        f"circle: {name}",
        recipe,
        make_data,
        floats={
            "network": {"skip_gain": rc.Gains(attention=skip)},
            "output_dropout": np.float32(is_published),
        },
        program=f"{config.mlp}, d={width}" + SUMS * is_summed,
    )


def measure_walk(
    num_steps: int, task: TrainedTask, model: Model, data: dict[str, Examples], key: jax.Array
) -> dict[str, Array]:
    """Measures how one seed continues its own output, after the points on which it was trained.

    The network gets sums as inputs if the program of its task does.

    Args:
        num_steps: Points of the walk, the start included.
        task: The training task.
        model: The trained model.
        data: Examples of the seed.
        key: Unused.

    Returns:
        "trajectory" [t, 2, 2], "distance" [t] between its two points, and "error", √(E‖Δ‖² / 4) of
        one step on the training data, where Δ is the error of a point. From the theory (see
        `experiments.circle.recurrence`): "log10_distance" [t], with the logarithm carried;
        "head_gap" [t, l, h]; "jacobian_across" [2, 2], the Jacobian of a step of the recurrence at
        the end of a walk of equal points, which begins in the middle of the last two points.
        "equal_points_moved" is the length of the last step of this walk.
    """
    config, skip = task.recipe.config, task.program.endswith(SUMS)

    def step(points):
        return forward(model, points, config)

    def step_recurrence(points):
        return points + step(points) if skip else step(points)

    def attention_weights(points):
        states = input_states(model.network, points, config)
        return rc.apply(model.network, states, config).attention

    walk, train = data["walk"], data["train"]
    squares = (jax.vmap(step)(train.inputs) - train.labels) ** 2
    path = roll_out(step, walk.inputs[0], num_steps, skip=skip)
    inputs = jnp.cumsum(path, axis=0) if skip else path
    middle = jnp.mean(inputs[-1], axis=0)
    collapsed, moved = recurrence.equal_tokens(step_recurrence, middle, COLLAPSED_STEPS)
    return {
        "trajectory": path,
        "distance": distance(path),
        "error": jnp.sqrt(0.5) * jnp.sqrt(jnp.mean(squares)),
        "log10_distance": recurrence.log_roll_out(
            model.network, model.classifier, walk.inputs[0], config, num_steps, skip=skip
        ),
        "head_gap": head_gap(jax.lax.map(attention_weights, inputs)),
        "jacobian_across": recurrence.transverse_jacobian(step_recurrence, collapsed),
        "equal_points_moved": moved,
    }


def roll_out(
    step: Callable[[Float[Array, "n 2"]], Float[Array, "n 2"]],
    start: Float[Array, "n 2"],
    num_steps: int,
    skip: bool = False,
) -> Float[Array, "t n 2"]:
    """Feeds a network with its own output; returns the trajectory [num_steps, n, 2].

    Args:
        step: The network, points to points.
        start: The first points of the trajectory.
        num_steps: Points of the trajectory, the start included.
        skip: Feed the network the sum of its input and its output (a skip connection around the
            recurrence) and record its outputs, as the published code's circle_skip does.
    """

    def advance(state: Array, _: None):
        output = step(state)
        return (state + output if skip else output), output

    _, outputs = jax.lax.scan(advance, start, None, length=num_steps - 1)
    return jnp.concatenate([start[None], outputs])


def distance(trajectory: Float[Array, "t 2 2"]) -> Float[Array, "t"]:
    """Computes the distance between the two points at each step."""
    return jnp.linalg.norm(trajectory[:, 0] - trajectory[:, 1], axis=-1)


def head_gap(attention: Float[Array, "*s 2 2"]) -> Float[Array, "*s"]:
    """Computes τ = P_11 − P_21: how much more than the other walker a walker attends to the first.

    The difference of two tokens, δ, leaves attention as Σ_h τ_h δ W_h.
    """
    return attention[..., 0, 0] - attention[..., 1, 0]


def measure_seeds(case: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes the theoretical and measured numbers of each seed of a case, [s], as in results.csv.

    "multiplier" is μ at the end of the walk of equal points; it predicts steps only if these points
    are at rest there.

    Args:
        case: Results of `measure_walk` for all seeds, and "diverged_at".
    """
    distances, start = case["distance"], case["head_gap"][:, 0]  # [s, t], [s, l, h]
    multiplier = recurrence.spectral_radius(case["jacobian_across"])
    at_rest = case["equal_points_moved"] < AT_REST
    predicted = recurrence.predicted_steps(multiplier, HIGH, LOW)
    is_opposite = (start.min(axis=-1) < 0) & (start.max(axis=-1) > 0)
    return {
        "diverged": diverged_seeds(case),
        "step_error": case["error"],
        "distance_at_end": distances[:, -1],
        "fell": distances[:, -1] < TOGETHER,
        "measured_steps": recurrence.measured_steps(distances, HIGH, LOW),
        "predicted_steps": np.where(at_rest, predicted, np.nan),
        "multiplier": multiplier,
        "at_rest": at_rest,
        "order": recurrence.fall_order(case["log10_distance"]),
        "opposite_at_start": is_opposite.any(axis=-1),
    }


def fine_cases(
    results: Mapping[str, dict[str, np.ndarray]],
) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Selects the seeds that did not diverge.

    Args:
        results: {case: arrays of all seeds [s, ...]}.

    Returns:
        {(variant, width): its arrays and those of `measure_seeds` [s], and the positions "seed"
        [s]; "orders", the orders of the law in the seeds that collapsed, where the law has one;
        "name" of the case}.
    """
    cases = {}
    for name, case in results.items():
        seeds = fine_seeds(case)
        arrays = {n: a for n, a in case.items() if n != "model"}
        values = {n: a[seeds] for n, a in (arrays | measure_seeds(case)).items()}
        orders = values["order"][values["fell"] & np.isfinite(values["order"])]
        cases[split_name(name)] = values | {"seed": seeds, "orders": orders, "name": name}
    return cases


def log10_at_end(case: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns log10 of the distance after the last step, at least log10 of 1e-6, [s].

    NaN of seeds that diverged.
    """
    bounded = np.maximum(case["log10_distance"][:, -1], np.log10(LOW))
    return np.where(diverged_seeds(case), np.nan, bounded)
