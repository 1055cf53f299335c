"""The circle's networks: what is trained, their walks fed with their own output, and its theory."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import rank_collapse as rc
from experiments.paper.circle import recurrence, task as circle
from experiments.train.training import TrainedTask, diverged, kept
from rank_collapse.network.inputs import input_states
from rank_collapse.training import Recipe, forward

COLLAPSED_STEPS = 1000  # of equal tokens, to reach the fixed point near which a multiplier holds
TOGETHER = 0.01  # two points this near have fallen together: 1/60 of the circle's diameter
HIGH, LOW = 1e-2, 1e-6  # distances between which the steps of a fall are counted
SUMS = ", sums"  # in the name of a program that is fed with sums
AT_REST = 1e-5  # equal points that move less in a step are at a fixed point


def parts_of(name: str) -> tuple[str, int]:
    """(variant, width) of a case's name, "base, d=32"."""
    variant, width = name.split(", d=")
    return variant, int(width)


def fed_with_sums(variant: str) -> bool:
    """Whether a skip leads around the recurrence."""
    return variant.startswith("circle_skip")


def setup(options: flags.FlagValues, name: str) -> TrainedTask:
    """One case: its network, and the walk it is trained on.

    Post-norm layers on linearly embedded points, no positions. A network without a skip around its
    attention is one whose skip has the gain 0, and one without dropout of its output one whose rate
    there is multiplied by 0: cases that differ in these alone are of one program.
    """
    variant, width = parts_of(name)
    published, sums = not variant.startswith("attention"), fed_with_sums(variant)
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
        walk = circle.make_examples(options.n_train_data)
        before = circle.with_batch_before(walk, options.batch_size)
        return {"train": before if sums else walk, "walk": walk}

    skip = np.float32(published or "skip" in variant)
    return TrainedTask(
        options,
        "circle",
        f"circle: {name}",
        recipe,
        make_data,
        floats={
            "network": {"skip_gain": rc.Gains(attention=skip)},
            "output_dropout": np.float32(published),
        },
        program=f"{config.mlp}, d={width}" + SUMS * sums,
    )


def roll_out(num_steps: int, setup: TrainedTask, model: Any, data: Any, key: Any) -> dict[str, Any]:
    """One seed's continuation of its own output, after the points it was trained on.

    Fed with sums where the program of the setup is.

    Returns:
        "trajectory" [t, 2, 2], "distance" [t] of its two points, and "error", √(E‖Δ‖² / 4) of one
        step on the training data, Δ the error of a point. Of the theory (see
        `experiments.paper.circle.recurrence`): "log10_distance" [t], with the logarithm carried;
        "head_gap" [t, l, h]; the Jacobians of a step of the recurrence, "jacobian_at_end" [4, 4]
        where the two points end, "jacobian_across" [2, 2] where equal points end that begin in
        their middle, and "equal_points_moved", the length of the last step of those.
    """
    config, skip = setup.recipe.config, setup.program.endswith(SUMS)

    def step(points):
        return forward(model, points, config)

    def recurrent(points):
        return points + step(points) if skip else step(points)

    def weights(points):
        states = input_states(model.network, points, config)
        return rc.apply(model.network, states, config).attention

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


def measures_of(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """What theory and measurement say of each seed of a case, arrays [s] as in results.csv.

    "multiplier" is μ where equal points are at last; it predicts steps only where they are at rest.
    """
    distance, gaps = case["distance"], case["head_gap"]
    multiplier = recurrence.spectral_radius(case["jacobian_across"])
    at_rest = case["equal_points_moved"] < AT_REST
    predicted = recurrence.predicted_steps(multiplier, HIGH, LOW)
    ends = {"start": gaps[:, 0], "end": gaps[:, -1]}  # [s, l, h]

    def opposite(gap):
        return ((gap.min(axis=-1) < 0) & (gap.max(axis=-1) > 0)).any(axis=-1)

    return {
        "diverged": diverged(case),
        "step_error": case["error"],
        "distance_at_start": distance[:, 0],
        "distance_at_end": distance[:, -1],
        "first_below_1e-2": first_below(distance, HIGH),
        "first_below_1e-6": first_below(distance, LOW),
        "fell": distance[:, -1] < TOGETHER,
        "measured_steps": recurrence.measured_steps(distance, HIGH, LOW),
        "predicted_steps": np.where(at_rest, predicted, np.nan),
        "multiplier": multiplier,
        "at_rest": at_rest,
        "radius_at_end": recurrence.spectral_radius(case["jacobian_at_end"]),
        "order": recurrence.fall_order(case["log10_distance"]),
        "opposite_at_start": opposite(ends["start"]),
        "opposite_at_end": opposite(ends["end"]),
    } | {
        f"tau_{when}_l{layer}_h{head}": gap[:, layer, head]
        for when, gap in ends.items()
        for layer, head in np.ndindex(gap.shape[1:])
    }


def known(results: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """{(variant, width): its arrays and `measures_of` of the seeds that did not diverge, "seed"
    [s]; "orders", the law's of those that fell, where it has one; "name" of the case}."""
    found = {}
    for name, case in results.items():
        seeds, arrays = kept(case), {n: a for n, a in case.items() if n not in ("seconds", "model")}
        own = {n: a[seeds] for n, a in (arrays | measures_of(case)).items()}
        orders = own["order"][own["fell"] & np.isfinite(own["order"])]
        found[parts_of(name)] = own | {"seed": seeds, "orders": orders, "name": name}
    return found


def log10_at_end(case: Mapping[str, Any]) -> np.ndarray:
    """log10 of the distance after the last step, which counts as 1e-6 at least, [s]; NaN of seeds
    that diverged."""
    at_least = np.maximum(case["log10_distance"][:, -1], np.log10(LOW))
    return np.where(diverged(case), np.nan, at_least)


def first_below(distance: np.ndarray, bound: float) -> np.ndarray:
    """The first step at which each distance [s, t] is below a bound; None where it never is."""
    below = distance < bound
    return np.where(below.any(axis=1), below.argmax(axis=1), None)
