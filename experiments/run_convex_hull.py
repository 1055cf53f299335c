"""Convex hull: a network trained to find the points on the hull, analysed by path length.

Reproduces the convex-hull panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2) with the whole model and the baselines measured, error bars over seeds and repeats, and
the exact sum over all paths of a length beside the sampled sets.

    python -m experiments.run_convex_hull --width 3 --depth 6 --seq_len 10 --hidden_dim 84 \\
        --seed 2 --num_labels 2 --n_epochs 70 --path_len 0 --n_paths 5 --n_train_data 10000 \\
        --n_repeat 5 --ffn2 --n_eval_data 300 --no_sub_path

Two CPU cores: about 100 seconds of training a seed. Expected: whole-model accuracy 0.951.
"""

import functools
from collections.abc import Iterator

import xarray as xr

import rank_collapse as rc
from experiments.lab import cli
from experiments.lab.experiment import Experiment, Shown, open_run
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.paper import path_lengths
from experiments.paper.path_accuracies import FIGURES
from experiments.paper.path_lengths import as_dataset, compare, evaluate, identity, table
from experiments.train import arguments, convex_hull
from experiments.train.training import ALONE, TrainedTask, arrays_of, model_files, train_and_eval
from experiments.verdicts.claims import Row
from rank_collapse.training.tasks import examples

FLAGS = arguments.make_flags(
    "convex_hull",
    num_heads=3,
    d_model=84,
    num_tokens=10,
    num_labels=2,
    n_train_data=10000,
    n_eval_data=300,
    n_epochs=70,
    weight_decay=1e-3,
)
arguments.add_path_flags(FLAGS)
cli.definer(FLAGS)(
    "boolean",
    "ffn2",
    True,
    "Points pass linear-gelu-linear before the first layer, not one linear map.",
)


def make_setup(options: Flags) -> TrainedTask:
    """What the flags train: a network that says of each point whether it is on the hull.

    Raises:
        ValueError: Another number of labels than two, or lengths that do not fit.
    """
    path_lengths.check_lengths(options)
    if options.num_labels != 2:
        raise ValueError(f"num_labels={options.num_labels}: on the hull or not are 2 labels")
    embedding = rc.EmbeddingConfig(d_input=2, d_embed=options.d_model, hidden_layer=options.ffn2)
    make = functools.partial(convex_hull.make_examples, num_points=options.num_tokens)
    return TrainedTask(
        options,
        name="convex_hull",
        title=f"Convex hull of {options.num_tokens} points",
        recipe=arguments.recipe(options, embedding, schedule="milestones"),
        make_data=functools.partial(train_and_eval, make, options),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "auc": examples.area_under_curve,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.90, "baseline": 0.54},
    )


def measure(options: Flags, setup: TrainedTask, run: RunFolder) -> xr.Dataset:
    """Trains every seed, and evaluates its paths: one program of `evaluate` for all seeds."""
    evaluate_one = functools.partial(evaluate, options)
    arrays = arrays_of(options, {ALONE: setup}, run, evaluate_one)[ALONE]
    return as_dataset(options, setup, arrays)


EXPERIMENT = Experiment(
    order=60,
    title="Paths: convex hull",
    brief="the same for points on a convex hull",
    claim="Section 4.2: with a skip network of 6 layers, short paths alone come near the whole "
    "model's accuracy, and the accuracy of a path falls with its length.",
    presets={
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --depth=4 --d_model=48 "
        "--n_train_data=1500 --n_epochs=8 --n_eval_data=60",
        "paper": "--num_seeds=8 --no_sub_path",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --num_labels=2",
    },
)


def claims(found: xr.Dataset, setup: TrainedTask) -> Iterator[Row]:
    """Judges the statements on paths, in the setting of this task."""
    return path_lengths.claims("convex hull", found, setup)


def main(options: Flags) -> Shown:
    """Trains networks, evaluates their paths by length, and shows what these carry."""
    with open_run(options, make_setup, identity) as run:
        points = run.measure(measure)
        return run.publish(
            points,
            table=table,
            figures=FIGURES,
            claims=claims,
            compare=compare,
            files=model_files,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
