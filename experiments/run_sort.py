"""Sorting: a network trained to sort letters, and the accuracy of its paths of each length alone.

Reproduces the sorting panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2) with the whole model and the baseline measured, error bars over seeds and repeats, and
the exact sum over all paths of a length beside the sampled sets.

    python -m experiments.run_sort --width 2 --depth 6 --hidden_dim 48 --seed 2 --num_labels 10 \\
        --seq_len 8 --n_epochs 65 --path_len 0 --n_paths 5 --n_train_data 1000 --n_repeat 5 \\
        --n_eval_data 200 --no_sub_path

Two CPU cores: 59 seconds for 16 seeds. Expected: whole-model accuracy 0.995.
"""

import functools
from collections.abc import Iterator

import xarray as xr

from experiments.lab import cli
from experiments.lab.experiment import Experiment, Shown, open_run
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.paper import path_lengths
from experiments.paper.path_accuracies import FIGURES, finding
from experiments.paper.path_lengths import as_dataset, compare, evaluate, identity, table
from experiments.train import arguments
from experiments.train.sorting import sorting_setup
from experiments.train.training import ALONE, TrainedTask, arrays_of, model_files
from experiments.verdicts.claims import Row

FLAGS = arguments.make_flags("sort", no_repeat=False)
arguments.add_path_flags(FLAGS)


def make_setup(options: Flags) -> TrainedTask:
    """What the flags train, and whose paths are evaluated.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    path_lengths.check_lengths(options)
    return sorting_setup(options)


def measure(options: Flags, setup: TrainedTask, run: RunFolder) -> xr.Dataset:
    """Trains every seed, and evaluates its paths: one program of `evaluate` for all seeds."""
    evaluate_one = functools.partial(evaluate, options)
    arrays = arrays_of(options, {ALONE: setup}, run, evaluate_one)[ALONE]
    return as_dataset(options, setup, arrays)


EXPERIMENT = Experiment(
    order=50,
    title="Paths: sorting",
    brief="sorting: accuracy of paths by length, 5 paths, 20 paths and all of them",
    claim="Section 4.2: with a skip network of 6 layers, short paths alone come near the whole "
    "model's accuracy, and the accuracy of a path falls with its length.",
    presets={
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --depth=4 --n_epochs=5 "
        "--learning_rate=2e-3 --n_eval_data=60",
        "paper": "--num_seeds=8 --no_sub_path",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --num_labels=4",
    },
)


def claims(found: xr.Dataset, setup: TrainedTask) -> Iterator[Row]:
    """Judges the statements on paths, in the setting of this task."""
    return path_lengths.claims("sorting", found, setup)


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
            finding=functools.partial(finding, "of the letters are sorted"),
            files=model_files,
        )


if __name__ == "__main__":
    cli.run(main, FLAGS)
