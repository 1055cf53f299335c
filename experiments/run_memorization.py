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

import jax.numpy as jnp
import numpy as np
import xarray as xr

import rank_collapse as rc
from experiments.lab import cli, vocabulary
from experiments.lab.experiment import Experiment, Shown, open_run
from experiments.lab.flags import Flags, content_hash
from experiments.lab.folder import RunFolder
from experiments.paper import path_lengths
from experiments.paper.path_accuracies import FIGURES
from experiments.paper.path_lengths import as_dataset, compare, evaluate, identity, table
from experiments.train import arguments, memorization, pairs as texts
from experiments.train.training import ALONE, TrainedTask, arrays_of, model_files
from experiments.verdicts.claims import Row
from rank_collapse.training.tasks import examples

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
vocabulary.define_alias(
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
    """What the flags train; reads the texts.

    Raises:
        ValueError: Texts or tokenizer that cannot be read.
    """
    path_lengths.check_lengths(options)
    pairs = texts.read_pairs(options.task_name, options.data_dir, options.n_train_data)
    tokenizer, origin = texts.load_tokenizer(options.model_name_or_path, pairs)
    print(origin)
    ids, mask = texts.encode_pairs(tokenizer, pairs, options.num_tokens)
    content = content_hash(ids.tobytes() + mask.tobytes())
    # Rows of the table that no text uses get no gradient: leaving them out changes nothing.
    tokens, used = memorization.compact_vocabulary(ids)
    return memorized(options, tokens, mask, len(used), {"texts": content})


def memorized(options: Flags, tokens, mask, vocab_size, extra=None) -> TrainedTask:
    """What is trained on given texts: token ids and mask, both [b, n]."""
    embedding = rc.EmbeddingConfig(
        vocab_size=vocab_size, d_embed=options.d_model, projection="before_norm"
    )
    rows, batch_size = None, options.batch_size
    if options.pack:
        rows = examples.packed_rows(np.asarray(mask).sum(axis=1), options.num_tokens)
        # As many rows as hold about batch_sz texts.
        batch_size = max(1, round(options.batch_size * len(rows) / len(tokens)))
    more = {"batch_size": batch_size, "shuffle": True, "schedule": "linear", "clip_norm": 1.0}
    return TrainedTask(
        options,
        name="memorization",
        title=f"Memorizing random labels of {len(tokens)} texts",
        recipe=arguments.recipe(options, embedding, **more),
        make_data=functools.partial(
            labelled_texts, options, *map(jnp.asarray, (tokens, mask)), rows
        ),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "loss": examples.loss_metric,
        }
        | ({"auc": examples.area_under_curve} if options.num_labels == 2 else {}),
        published={"whole": 0.85, "baseline": 0.50},
        batch_size=min(options.per_device_eval_batch_size, 8),
        extra=extra,
    )


def labelled_texts(options: Flags, tokens, mask, rows, key) -> dict:
    """The texts with one seed's labels; the evaluation is on the first of them.

    Where there are rows, "train" is packed and "texts" is not.
    """
    labelled = memorization.make_examples(key, tokens, mask, options.num_labels)
    data = {"train": labelled, "eval": labelled.first(options.n_eval_data)}
    if rows is not None:
        data |= {"train": examples.pack_examples(labelled, rows), "texts": labelled}
    return data


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
