"""Memorization: a network trained to memorize random labels of the tokens of real texts.

Reproduces the memorization panel of the path-length figure of Dong, Cordonnier and Loukas (2021,
section 4.2): pairs of sentences from GLUE's RTE, a random 0 or 1 for every token, evaluated on the
training data. The whole model and the baselines are measured, with error bars over seeds.

    python -m experiments.run_memorization --model_name_or_path bert-base-uncased --task_name RTE \\
        --do_train --data_dir data/RTE --max_seq_length 128 --per_device_eval_batch_size=32 \\
        --per_device_train_batch_size=8 --learning_rate 3e-4 --num_train_epochs 50 \\
        --output_dir snap/RTE --overwrite_output_dir --width 2 --depth 6 --hidden_dim 250 \\
        --n_repeat 5 --n_paths 5 --n_train_data 500 --no_sub_path --path_len 0

Needs RTE's train.tsv in --data_dir. --model_name_or_path names a local folder with a WordPiece
tokenizer; where it does not exist a vocabulary is trained on the data (nothing is downloaded).
Texts are packed: one row holds several whole texts, and each attends only to itself; see
--pack. Two CPU cores: 18.5 minutes for five seeds, other jobs running. Expected: whole-model
accuracy 0.858.
"""

import functools
from collections.abc import Iterator

import xarray as xr

from experiments.lab import cli, vocabulary
from experiments.lab.experiment import Experiment, Shown, open_run
from experiments.lab.flags import Flags
from experiments.lab.folder import RunFolder
from experiments.paper import path_lengths
from experiments.paper.path_accuracies import FIGURES
from experiments.paper.path_lengths import as_dataset, checked, compare, evaluate, identity, table
from experiments.train import arguments, pairs as texts
from experiments.train.tasks import memorization_setup
from experiments.train.training import ALONE, TrainedTask, arrays_of, model_files
from experiments.verdicts.claims import Row

FLAGS = arguments.make_flags(
    "memorization",
    d_model=250,
    num_tokens=128,
    num_labels=2,
    n_train_data=500,
    n_eval_data=88,
    n_epochs=50,
    batch_size=8,
    learning_rate=3e-4,
)
arguments.add_path_flags(FLAGS)
vocabulary.alias(
    FLAGS,
    max_seq_length="num_tokens",
    num_train_epochs="n_epochs",
    per_device_train_batch_size="batch_size",
    overwrite_output_dir="overwrite",
)
define = cli.definer(FLAGS)
define(
    "string",
    "model_name_or_path",
    "bert-base-uncased",
    "Folder or file of a WordPiece tokenizer; "
    "of any other name only a vocabulary trained on the data is made.",
)
define("enum", "task_name", "RTE", "Whose texts.", texts.TASKS)
define("string", "data_dir", "data/RTE", "Folder of the task's files.")
define(
    "integer",
    "per_device_eval_batch_size",
    32,
    "Texts evaluated at a time: memory, not results.",
    lower_bound=1,
)
define(
    "boolean",
    "pack",
    True,
    "Train on rows of whole texts one behind another, each attending to "
    "itself only, instead of one padded text a row. A step then takes about batch_size texts, and "
    "texts of a row are always in one batch; about twice as fast.",
)


def make_setup(options: Flags) -> TrainedTask:
    """What the flags train, and whose paths are evaluated.

    Raises:
        ValueError: Flags that do not fit each other.
    """
    return checked(options, memorization_setup(options))


def measure(options: Flags, setup: TrainedTask, run: RunFolder) -> xr.Dataset:
    """Trains every seed, and evaluates its paths: one program of `evaluate` for all seeds."""
    evaluate_one = functools.partial(evaluate, options)
    arrays = arrays_of(options, {ALONE: setup}, run, evaluate_one)[ALONE]
    return as_dataset(options, setup, arrays)


EXPERIMENT = Experiment(
    order=70,
    title="Paths: memorization",
    brief="the same for random labels of texts learned by heart",
    claim="Section 4.2: with a skip network of 6 layers, short paths alone come near the whole "
    "model's accuracy, and the accuracy of a path falls with its length.",
    presets={
        # The 21 texts in three batches of one size, so that an evaluation is compiled once.
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --task_name=shipped --depth=3 "
        "--d_model=64 --n_epochs=60 --learning_rate=2e-3 --per_device_eval_batch_size=7",
        "paper": "--num_seeds=8 --no_sub_path",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --task_name=shipped --num_tokens=8",
    },
)


def claims(found: xr.Dataset, setup: TrainedTask) -> Iterator[Row]:
    """Judges the statements on paths, in the setting of this task."""
    return path_lengths.claims("memorization", found, setup)


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
