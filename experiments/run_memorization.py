"""Memorization: a network trained to memorize random labels of the tokens of real texts.

Reproduces the memorization panel of the path-length figure in Dong, Cordonnier and Loukas (2021,
section 4.2). The texts are pairs of sentences from GLUE's RTE; every token has a random label, 0 or
1, and the network is evaluated on its training data. Measures the full model and the baselines,
with error bars over seeds.

    python -m experiments.run_memorization --model_name_or_path bert-base-uncased --task_name RTE \\
        --do_train --data_dir data/RTE --max_seq_length 128 --per_device_eval_batch_size=32 \\
        --per_device_train_batch_size=8 --learning_rate 3e-4 --num_train_epochs 50 \\
        --output_dir snap/RTE --overwrite_output_dir --width 2 --depth 6 --hidden_dim 250 \\
        --n_repeat 5 --n_paths 5 --n_train_data 500 --no_sub_path --path_len 0

Needs RTE's train.tsv in --data_dir. --model_name_or_path names a local folder with a WordPiece
tokenizer; if there is no such folder, the command trains a vocabulary on the data. It downloads
nothing. Texts are packed: a row holds several texts, each of which attends only to itself, and a
step takes about as many texts as without packing. Training is twice as fast this way. Five seeds
took 18.5 minutes on two cores while other jobs ran. docs/experiments/run_memorization.md has the
results, and `experiments.path_accuracy.evaluation` says what is measured.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

import rank_collapse as rc
from experiments.lab import (
    Experiment,
    Flags,
    Options,
    Run,
    cli,
    content_hash,
    describe_figures,
    open_run,
    shared_flags,
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
from experiments.train import arguments, pairs as texts
from experiments.train.train_networks import save_models
from experiments.train.trained_tasks import ALONE, TrainedTask
from rank_collapse.printed import format_count
from rank_collapse.training.tasks import examples

FLAGS = arguments.make_flags(
    "memorization",
    depth=6,
    num_heads=2,
    d_model=250,
    num_tokens=128,
    num_labels=2,
    n_train_data=500,
    n_eval_data=88,
    n_epochs=50,
    batch_size=8,
    learning_rate=3e-4,
    weight_decay=0.0,
    dropout=0.1,
    path_len=0,
    n_paths=5,
    n_repeat=5,
    no_sub_path=False,
)
shared_flags.define_alias(
    FLAGS,
    max_seq_length="num_tokens",
    num_train_epochs="n_epochs",
    per_device_train_batch_size="batch_size",
    overwrite_output_dir="overwrite",
)
FLAGS.define(
    "string",
    "model_name_or_path",
    "bert-base-uncased",
    "Folder or file of a WordPiece tokenizer; "
    "of any other name only a vocabulary trained on the data is made.",
)
FLAGS.define("enum", "task_name", "RTE", "Whose texts.", texts.TASKS)
FLAGS.define("string", "data_dir", "data/RTE", "Folder of the task's files.")
FLAGS.define(
    "integer",
    "per_device_eval_batch_size",
    32,
    "Texts evaluated at a time; changes the memory, not the results.",
    lower_bound=1,
)


def make_task(options: Options) -> TrainedTask:
    """Reads the texts of the flags, and makes the training task on them.

    Args:
        options: The flags.

    Raises:
        ValueError: Texts or tokenizer that cannot be read, or paths longer than the depth.
    """
    sampled_lengths(options)  # refuses --path_len above --depth
    pairs = texts.read_pairs(options.task_name, options.data_dir, options.n_train_data)
    tokenizer, origin = texts.load_tokenizer(options.model_name_or_path, pairs)
    print(origin)
    ids, mask = texts.encode_pairs(tokenizer, pairs, options.num_tokens)
    content = content_hash(ids.tobytes() + mask.tobytes())
    # Rows of the table that no text uses get no gradient: leaving them out changes nothing.
    tokens, used = compact_vocabulary(ids)
    return make_text_task(options, tokens, mask, len(used), {"texts": content})


def make_text_task(
    options: Options,
    tokens: Int[np.ndarray, "b n"],
    mask: Bool[np.ndarray, "b n"],
    vocab_size: int,
    extra: dict[str, str] | None = None,
) -> TrainedTask:
    """Makes the training task on texts.

    Args:
        options: The flags.
        tokens, mask: Token ids of the texts, and a mask of existing tokens, [b, n].
        vocab_size: Ids are below it.
        extra: Identifies the texts, for config.json.
    """
    embedding = rc.EmbeddingConfig(
        vocab_size=vocab_size, d_embed=options.d_model, projection="before_norm"
    )
    rows = examples.packed_rows(np.asarray(mask).sum(axis=1), options.num_tokens)
    # As many rows as hold about batch_sz texts.
    batch_size = max(1, round(options.batch_size * len(rows) / len(tokens)))
    fields = {"batch_size": batch_size, "shuffle": True, "schedule": "linear", "clip_norm": 1.0}
    metrics = {
        "accuracy": examples.token_accuracy,
        "exact_match": examples.exact_match,
        "loss": examples.loss_metric,
    }
    if options.num_labels == 2:
        metrics["auc"] = examples.area_under_curve
    return TrainedTask(
        options,
        name="memorization",
        title=f"Memorizing random labels of {format_count(len(tokens), 'text')}",
        recipe=arguments.make_recipe(options, embedding, **fields),
        make_data=functools.partial(make_data, options, *map(jnp.asarray, (tokens, mask)), rows),
        metrics=metrics,
        published={"whole": 0.85, "baseline": 0.50},
        batch_size=min(options.per_device_eval_batch_size, 8),
        extra=extra,
    )


def make_data(
    options: Options,
    tokens: Int[Array, "b n"],
    mask: Bool[Array, "b n"],
    rows: Int[np.ndarray, "r n 2"],
    key: jax.Array,
) -> dict[str, examples.Examples]:
    """Gives the texts one seed's labels; the evaluation uses the first of them.

    Args:
        options: The flags.
        tokens, mask: Token ids, and a mask of existing tokens, [b, n].
        rows: Texts that each row packs.
        key: Random key for the labels.

    Returns:
        "train", packed; "texts", the same without packing; "eval", the first of these.
    """
    labelled = make_examples(key, tokens, mask, options.num_labels)
    evaluated = labelled.first(options.n_eval_data)
    return {"train": examples.pack_examples(labelled, rows), "texts": labelled, "eval": evaluated}


def make_examples(
    key: jax.Array, tokens: Int[Array, "b n"], mask: Bool[Array, "b n"], num_labels: int = 2
) -> examples.Examples:
    """Draws a label for each token of each text uniformly at random, independently of the token.

    Source: Dong et al. 2021, section 4.2.
    """
    labels = jax.random.randint(key, tokens.shape, 0, num_labels)
    return examples.Examples(inputs=tokens, labels=labels, mask=mask)


def compact_vocabulary(
    tokens: Int[np.ndarray, "b n"],
) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, "v"]]:
    """Renumbers token ids 0..v−1 by the tokens that occur; also returns the original id of each.

    Rows of an embedding table that never occur get no gradient, and without weight decay Adam does
    not change them. Training on the compact table is therefore the same, without their memory
    traffic.
    """
    used, compact = np.unique(tokens, return_inverse=True)
    return compact.reshape(tokens.shape).astype(np.int32), used


EXPERIMENT = Experiment(
    order=70,
    title="Paths: memorization",
    brief="accuracy by path length of networks that memorize random labels of texts",
    claim=CLAIM,
    presets={
        # The 21 texts in three batches of one size, so that an evaluation is compiled once.
        "quick": "--num_seeds=6 --n_repeat=2 --no_sub_path --task_name=shipped --depth=3 "
        "--d_model=64 --n_epochs=60 --learning_rate=2e-3 --per_device_eval_batch_size=7",
        "reported": "--seed=3000 --num_seeds=6 --no_sub_path --n_epochs=15 --n_repeat=2",
        "tiny": f"{arguments.TINY} --n_paths=2 --n_repeat=1 --task_name=shipped --num_tokens=8",
    },
    figures=describe_figures(short_paths_figure, paths_figure, shares_figure, loss_figure),
)


def main(options: Flags) -> Run:
    """Measures the points, the combinations of flag values, that the run folder lacks; saves the
    table, figures and claims."""
    with open_run(options, make_task, lambda task: task.extra) as run:
        for point in run.measure(measure_paths):
            results, task = point.results, point.setup
            point.save_table(make_rows(results, task))
            point.save_figure("short_paths", short_paths_figure, results, task)
            point.save_figure("paths", paths_figure, results, task)
            point.save_figure("shares", shares_figure, results, task)
            point.save_figure("loss", loss_figure, results, task)
            point.save_claims(judge_claims(results, task, "memorization"))
            point.save_comparisons(compare_results(results, task))
            save_models(point, {ALONE: task})
        return run.finish()


if __name__ == "__main__":
    cli.run(main, FLAGS)
