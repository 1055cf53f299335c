"""Convex hull: a network trained to find the points on the hull, analysed by path length.

Reproduces the convex-hull panel of the path-length figure in Dong, Cordonnier and Loukas (2021,
section 4.2). Measures the full model and the baselines, with error bars over seeds and repeats, and
compares sampled sets of paths with the exact sum over all paths of each length.

    python -m experiments.run_convex_hull --width 3 --depth 6 --seq_len 10 --hidden_dim 84 \\
        --seed 2 --num_labels 2 --n_epochs 70 --path_len 0 --n_paths 5 --n_train_data 10000 \\
        --n_repeat 5 --ffn2 --n_eval_data 300 --no_sub_path

A point on an edge between two corners counts as on the hull, and so does every copy of a repeated
point. The label thus depends only on the place of a point, not on the order of the points.

Training takes about 100 seconds for each seed on two cores. docs/experiments/run_convex_hull.md has
the results, and `experiments.path_accuracy.evaluation` says what is measured.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import rank_collapse as rc
from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Run,
    cli,
    describe_figures,
    open_run,
)
from experiments.path_accuracy.accuracy_figures import (
    loss_figure,
    paths_figure,
    shares_figure,
    short_paths_figure,
)
from experiments.path_accuracy.accuracy_results import (
    CLAIM,
    compare_results,
    judge_claims,
    make_rows,
)
from experiments.path_accuracy.evaluation import measure_paths, sampled_lengths
from experiments.train import arguments
from experiments.train.train_networks import save_models
from experiments.train.trained_tasks import (
    ALONE,
    TrainedTask,
    train_and_eval,
)
from rank_collapse.training.tasks import examples

SIDE = 10.0  # of the square the points are drawn from
SHIFT = 3.3  # standard deviation of the shift shared by an example's points
CELLS = 2**14  # of the grid per side: differences and their cross products fit an int32

FLAGS = arguments.make_flags(
    "convex_hull",
    depth=6,
    num_heads=3,
    d_model=84,
    num_tokens=10,
    num_labels=2,
    n_train_data=10000,
    n_eval_data=300,
    n_epochs=70,
    batch_size=30,
    learning_rate=1e-3,
    weight_decay=1e-3,
    dropout=0.1,
    path_len=0,
    n_paths=5,
    n_repeat=5,
    no_sub_path=False,
)
FLAGS.define(
    "boolean",
    "ffn2",
    True,
    "Points pass linear-gelu-linear before the first layer, not one linear map.",
)


def make_task(options: Options) -> TrainedTask:
    """Makes the training task of the flags: a network that decides for each point whether it is on
    the hull.

    Args:
        options: The flags.

    Raises:
        ValueError: A number of labels other than two, or paths longer than the depth.
    """
    sampled_lengths(options)  # refuses --path_len above --depth
    if options.num_labels != 2:
        raise ValueError(
            f"num_labels={options.num_labels} is not 2: a point is on the hull, or it is not"
        )
    embedding = rc.EmbeddingConfig(d_input=2, d_embed=options.d_model, hidden_layer=options.ffn2)
    make = functools.partial(make_examples, num_points=options.num_tokens)
    return TrainedTask(
        options,
        name="convex_hull",
        title=f"Convex hull of {options.num_tokens} points",
        recipe=arguments.make_recipe(options, embedding, schedule="milestones"),
        make_data=functools.partial(
            train_and_eval, make, options.n_train_data, options.n_eval_data
        ),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "auc": examples.area_under_curve,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.90, "baseline": 0.54},
    )


def make_examples(key: jax.Array, num_examples: int, num_points: int) -> examples.Examples:
    """Draws points uniformly on [0, 10]², shifted together by N(0, 3.3²), with their hull labels.

    The points lie on a grid of 2¹⁴ cells a side, so the labels are computed exactly with integers.
    Ties and points in a line occur, but rarely.

    Args:
        key: Random key of the draw.
        num_examples: Sets of points.
        num_points: Points of each.

    Source: Dong et al. 2021, section 4.2.
    """
    key_points, key_shift = jax.random.split(key)
    shape = (num_examples, num_points, 2)
    grid = jax.random.randint(key_points, shape, 0, CELLS + 1)
    shift = SHIFT * jax.random.normal(key_shift, (num_examples, 1, 2))

    def make_one(example):
        """Makes the points and labels of one example from its places on the grid and its shift."""
        places, shift = example
        return places * (SIDE / CELLS) + shift, hull_labels(places)

    # One after the other: in the loop the shift is a rounded number. Otherwise a compiler may fuse
    # the product in it with the sum, and points would depend on how hard it optimises.
    inputs, labels = jax.lax.map(make_one, (grid, shift))
    return examples.Examples(inputs=inputs, labels=labels)


def hull_labels(points: Int[Array, "n 2"]) -> Int[Array, "n"]:
    """Labels points 1 on the boundary of the convex hull (edges included), else 0. Exact.

    p is on the boundary iff all points lie on one side of a line through p and another point q:
    min_r (q − p) × (r − p) ≥ 0 for some q ≠ p, or all points are p. Coordinates may differ by at
    most 2¹⁵ − 1.

    Args:
        points: Whole numbers [n, 2].
    """
    p, q, r = points[:, None, None, :], points[None, :, None, :], points[None, None, :, :]
    a, b = q - p, r - p
    is_one_side = jnp.all(a[..., 0] * b[..., 1] >= a[..., 1] * b[..., 0], axis=2)
    is_same = jnp.all(points[:, None, :] == points[None, :, :], axis=-1)
    on_boundary = jnp.any(is_one_side & ~is_same, axis=1) | jnp.all(is_same, axis=1)
    return on_boundary.astype(jnp.int32)


EXPERIMENT = Experiment(
    order=60,
    title="Paths: convex hull",
    brief="accuracy by path length of networks that find the points on a convex hull",
    claim=CLAIM,
    presets={
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --depth=4 --d_model=48 "
        "--n_train_data=1500 --n_epochs=8 --n_eval_data=60",
        "reported": "--seed=3000 --num_seeds=6 --no_sub_path --n_epochs=20 --n_repeat=2",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --num_labels=2",
    },
    figures=describe_figures(short_paths_figure, paths_figure, shares_figure, loss_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_task) as run:
        for point in run.measure(measure_paths):
            results, task = point.results, point.setup
            point.save_table(make_rows(results, task))
            point.save_figure("short_paths", short_paths_figure, results, task)
            point.save_figure("paths", paths_figure, results, task)
            point.save_figure("shares", shares_figure, results, task)
            point.save_figure("loss", loss_figure, results, task)
            point.save_claims(judge_claims(results, task, "convex hull"))
            point.save_comparisons(compare_results(results, task))
            save_models(point, {ALONE: task})
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
