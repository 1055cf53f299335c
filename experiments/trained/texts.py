"""What run_memorization trains: token ids of texts, with random labels, packed or padded."""

import functools

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.trained import arguments
from experiments.trained.training import Setup
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.training.tasks import examples, memorization
from rank_collapse.training.training import Recipe


def setup_of(options: flags.FlagValues, tokens, mask, vocab_size, extra=None) -> Setup:
    """The experiment on given texts: token ids and mask, both [b, n]."""
    embedding = EmbeddingConfig(
        vocab_size=vocab_size, d_embed=options.hidden_dim, projection="before_norm"
    )
    rows, batch_size = None, options.batch_sz
    if options.pack:
        rows = examples.packed_rows(np.asarray(mask).sum(axis=1), options.seq_len)
        # As many rows as hold about batch_sz texts.
        batch_size = max(1, round(options.batch_sz * len(rows) / len(tokens)))
    return Setup(
        name="memorization",
        title=f"Memorizing random labels of {len(tokens)} texts",
        recipe=Recipe(
            config=arguments.network_config(options, embedding),
            num_outputs=options.num_labels,
            batch_size=batch_size,
            num_epochs=options.n_epochs,
            shuffle=True,
            schedule="linear",
            clip_norm=1.0,
        ),
        make_data=functools.partial(
            make_data, options, jnp.asarray(tokens), jnp.asarray(mask), rows
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


def make_data(options: flags.FlagValues, tokens, mask, rows, key) -> dict:
    """The texts with one seed's labels; the evaluation is on the first of them.

    Where there are rows, "train" is packed and "texts" is not.
    """
    labelled = memorization.make_examples(key, tokens, mask, options.num_labels)
    data = {"train": labelled, "eval": labelled.first(options.n_eval_data)}
    if rows is not None:
        data |= {"train": examples.pack(labelled, rows), "texts": labelled}
    return data
