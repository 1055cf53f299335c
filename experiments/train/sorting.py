"""Sorting letters: the label of position i is the i-th smallest letter of the sequence."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import rank_collapse as rc
from experiments.lab.grid import Options
from experiments.train import arguments
from experiments.train.trained_tasks import TrainedTask, train_and_eval
from rank_collapse.training.tasks import examples


def make_examples(
    key: jax.Array, num_examples: int, seq_len: int, num_letters: int, repeats: bool = True
) -> examples.Examples:
    """Draws letter sequences uniformly at random, with their sorted sequences as labels.

    Args:
        key: Random key of the draw.
        num_examples, seq_len, num_letters: Number of sequences, letters in each, and letters in the
            alphabet.
        repeats: Whether a letter may occur twice; if not, each sequence is a random choice of
            distinct letters in random order.

    Raises:
        ValueError: More distinct letters than the alphabet has.

    Source: Dong et al. 2021, section 4.2.
    """
    if not repeats and seq_len > num_letters:
        raise ValueError(f"seq_len={seq_len} is more than the {num_letters} distinct letters")
    if repeats:
        letters = jax.random.randint(key, (num_examples, seq_len), 0, num_letters)
    else:
        keys = jax.random.split(key, num_examples)
        shuffled = jax.vmap(lambda k: jax.random.permutation(k, num_letters))(keys)
        letters = shuffled[:, :seq_len]
    return examples.Examples(inputs=letters, labels=jnp.sort(letters, axis=-1))


def misordered_pairs(predicted: Int[Array, "b n"], repeats: bool = True) -> Float[Array, ""]:
    """Counts the pairs i < j predicted with p_i > p_j, mean over sequences.

    Args:
        predicted: Predicted letters.
        repeats: Whether a letter may occur twice; if not, a tie is out of order too: p_i ≥ p_j.
    """
    first, second = predicted[:, :, None], predicted[:, None, :]
    is_wrong = first > second if repeats else first >= second
    is_later = jnp.triu(jnp.ones(is_wrong.shape[1:], bool), k=1)
    return jnp.mean(jnp.sum(is_wrong & is_later[None], axis=(1, 2)).astype(jnp.float32))


def make_sorting_task(options: Options) -> TrainedTask:
    """Makes the training task of the flags: a network that sorts letters.

    Args:
        options: The flags.

    Raises:
        ValueError: More distinct letters than there are.
    """
    letters, tokens, repeats = options.num_labels, options.num_tokens, not options.no_repeat
    if not repeats and tokens > letters:
        raise ValueError(
            f"--no_repeat needs num_tokens={tokens} to be at most num_labels={letters}"
        )
    embedding = rc.EmbeddingConfig(
        vocab_size=letters,
        d_embed=options.d_model,
        positions="learned",
        num_positions=tokens,
        projection="before_norm",
    )
    make = functools.partial(make_examples, seq_len=tokens, num_letters=letters, repeats=repeats)

    def misordered(logits: Float[Array, "b n c"], _: examples.Examples) -> Float[Array, ""]:
        return misordered_pairs(logits.argmax(axis=-1), repeats)

    return TrainedTask(
        options,
        name="sort",
        title=f"Sorting {tokens} of {letters} letters",
        recipe=arguments.make_recipe(options, embedding),
        make_data=functools.partial(
            train_and_eval, make, options.n_train_data, options.n_eval_data
        ),
        metrics={
            "accuracy": examples.token_accuracy,
            "exact_match": examples.exact_match,
            "misordered_pairs": misordered,
            "loss": examples.loss_metric,
        },
        published={"whole": 0.98, "baseline": 0.10},
    )
