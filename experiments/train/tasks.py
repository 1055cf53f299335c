"""The tasks of the paper's section 4.2: letters to sort, points on a hull, labels of texts."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

import rank_collapse as rc
from experiments.lab.flags import content_hash
from experiments.train import arguments, convex_hull, memorization, pairs as texts, sorting
from experiments.train.training import TrainedTask, train_and_eval
from rank_collapse.training.tasks import examples


def sorting_setup(options: flags.FlagValues) -> TrainedTask:
    """What the flags train.

    Raises:
        ValueError: More distinct letters than there are.
    """
    letters, tokens, repeats = options.num_labels, options.num_tokens, not options.no_repeat
    if not repeats and tokens > letters:
        raise ValueError(f"--no_repeat: num_tokens={tokens} out of num_labels={letters} letters")
    embedding = rc.EmbeddingConfig(
        vocab_size=letters,
        d_embed=options.d_model,
        positions="learned",
        num_positions=tokens,
        projection="before_norm",
    )
    make = functools.partial(
        sorting.make_examples, seq_len=tokens, num_letters=letters, repeats=repeats
    )

    def misordered(logits: Any, _: Any) -> Any:
        return sorting.misordered_pairs(logits.argmax(axis=-1), repeats)

    return TrainedTask(
        options,
        name="sort",
        title=f"Sorting {tokens} of {letters} letters",
        recipe=arguments.recipe(options, embedding),
        make_data=functools.partial(train_and_eval, make, options),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "misordered_pairs": misordered,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.98, "baseline": 0.10},
    )


def hull_setup(options: flags.FlagValues) -> TrainedTask:
    """What the flags train.

    Raises:
        ValueError: Another number of labels than two.
    """
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


def memorization_setup(options: flags.FlagValues) -> TrainedTask:
    """What the flags train; reads the texts.

    Raises:
        ValueError: Texts or tokenizer that cannot be read.
    """
    pairs = texts.read_pairs(options.task_name, options.data_dir, options.n_train_data)
    tokenizer, origin = texts.load_tokenizer(options.model_name_or_path, pairs)
    print(origin)
    ids, mask = texts.encode_pairs(tokenizer, pairs, options.num_tokens)
    content = content_hash(ids.tobytes() + mask.tobytes())
    # Rows of the table that no text uses get no gradient: leaving them out changes nothing.
    tokens, used = memorization.compact_vocabulary(ids)
    return memorized(options, tokens, mask, len(used), {"texts": content})


def memorized(options: flags.FlagValues, tokens, mask, vocab_size, extra=None) -> TrainedTask:
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


def labelled_texts(options: flags.FlagValues, tokens, mask, rows, key) -> dict:
    """The texts with one seed's labels; the evaluation is on the first of them.

    Where there are rows, "train" is packed and "texts" is not.
    """
    labelled = memorization.make_examples(key, tokens, mask, options.num_labels)
    data = {"train": labelled, "eval": labelled.first(options.n_eval_data)}
    if rows is not None:
        data |= {"train": examples.pack(labelled, rows), "texts": labelled}
    return data
