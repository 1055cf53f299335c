"""Sequence tasks: copy, reverse or sort letters; token by token, or from a source to a target.

Token by token, for an encoder alone (`make_examples`), the label of position i is the letter there
of the copied, reversed or sorted sequence. From source to target, for an encoder-decoder
(`make_pairs`), the target is written out between a begin and an end mark, and lengths may differ.

Axis letters: b examples, n target tokens, m source tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rank_collapse import checks, struct
from rank_collapse.annotations import Key, Leaf
from rank_collapse.training.tasks.examples import Examples

PAD, BEGIN, END = 0, 1, 2
NUM_MARKS = 3  # a letter's token id is its number plus this
TASKS = ("copy", "reverse", "sort")


class SequencePairs(struct.Struct):
    """Pairs of sequences, padded; a decoder should answer the token after each that it reads."""

    source: Leaf  # Int [b, m]
    source_mask: Leaf  # Bool [b, m], which tokens exist
    target: Leaf  # Int [b, n], from the begin to the end mark
    target_mask: Leaf  # Bool [b, n]

    def __len__(self) -> int:
        return self.source.shape[-2]

    def first(self, count: int) -> "SequencePairs":
        """Select the first `count` pairs."""
        return jax.tree.map(lambda a: a[..., :count, :], self)

    @property
    def inputs(self) -> Leaf:
        """Returns the decoder's input under teacher forcing [b, n − 1], without the last token."""
        return self.target[..., :-1]

    @property
    def labels(self) -> Leaf:
        """Returns the tokens that the decoder should answer [b, n − 1]: all but the begin mark."""
        return self.target[..., 1:]

    @property
    def mask(self) -> Leaf:
        """Returns Bool [b, n − 1], which labels exist."""
        return self.target_mask[..., 1:]


def transform_letters(
    task: str, letters: Int[Array, "b n"], mask: Bool[Array, "b n"]
) -> Int[Array, "b n"]:
    """Copy, reverse or sort letters; padding stays after them.

    Args:
        task: One of `TASKS`.
        letters: Numbers of the letters in each sequence.
        mask: Bool, True for letters that exist.

    Raises:
        ValueError: Another task.
    """
    if task == "copy":
        return letters
    if task == "reverse":
        last = mask.sum(axis=1, keepdims=True) - 1
        index = last - jnp.arange(letters.shape[1])[None, :]
        return jnp.take_along_axis(letters, jnp.where(index < 0, 0, index), axis=1)
    if task == "sort":
        return jnp.sort(jnp.where(mask, letters, jnp.iinfo(letters.dtype).max), axis=1)
    raise ValueError(f"task={task!r} is not one of {TASKS}")


def make_examples(
    key: Key, num_examples: int, seq_len: int, num_letters: int, task: str = "reverse"
) -> Examples:
    """Draw random letters, each position labelled with its letter of the transformed sequence.

    Args:
        key: Random key for the letters.
        num_examples, seq_len, num_letters: Sizes.
        task: One of `TASKS`.
    """
    _check_sizes(num_examples, seq_len, num_letters)
    letters = jax.random.randint(key, (num_examples, seq_len), 0, num_letters)
    labels = transform_letters(task, letters, jnp.ones(letters.shape, bool))
    return Examples(inputs=letters, labels=labels)


def make_pairs(
    key: Key,
    num_examples: int,
    seq_len: int,
    num_letters: int,
    task: str = "reverse",
    min_len: int | None = None,
) -> SequencePairs:
    """Draw random letters as sources, and the transformed letters between two marks as targets.

    Token ids are 0 padding, 1 begin, 2 end, 3 .. num_letters + 2 letters, in both sequences.

    Args:
        key: Random key for letters and lengths.
        num_examples: Pairs.
        seq_len: Letters of the longest source; targets have two tokens more.
        num_letters: Number of letters in the alphabet.
        task: One of `TASKS`.
        min_len: Letters of the shortest source, lengths being uniform between the two; None for
            all of seq_len.

    Raises:
        ValueError: An unknown task, or lengths that leave no letter between the marks.
    """
    _check_sizes(num_examples, seq_len, num_letters)
    min_len = seq_len if min_len is None else checks.check_whole("min_len", min_len, 1, seq_len)
    key_letters, key_lengths = jax.random.split(key)
    letters = jax.random.randint(key_letters, (num_examples, seq_len), 0, num_letters)
    lengths = jax.random.randint(key_lengths, (num_examples, 1), min_len, seq_len + 1)
    mask = jnp.arange(seq_len)[None, :] < lengths
    answer = jnp.where(mask, transform_letters(task, letters, mask), 0)
    return between_marks(letters + NUM_MARKS, mask, answer + NUM_MARKS, mask)


def between_marks(
    source: Int[Array, "b m"],
    source_mask: Bool[Array, "b m"],
    target: Int[Array, "b k"],
    target_mask: Bool[Array, "b k"],
) -> SequencePairs:
    """Put targets between a begin and an end mark; sources stay as they are.

    Args:
        source, target: Token ids.
        source_mask, target_mask: Bool, True for tokens that exist.
    """
    count, one_more = len(target), ((0, 0), (0, 1))
    begin = jnp.full((count, 1), BEGIN)
    is_end = jnp.arange(target.shape[1] + 1)[None, :] == target_mask.sum(axis=1, keepdims=True)
    answer = jnp.pad(jnp.where(target_mask, target, PAD), one_more)
    exists = jnp.pad(target_mask, one_more) | is_end
    return SequencePairs(
        source=jnp.where(source_mask, source, PAD),
        source_mask=source_mask,
        target=jnp.concatenate([begin, jnp.where(is_end, END, answer)], axis=1),
        target_mask=jnp.concatenate([jnp.ones((count, 1), bool), exists], axis=1),
    )


def _check_sizes(num_examples, seq_len, num_letters):
    """Check that all sizes of a task are whole numbers of at least 1."""
    sizes = {"num_examples": num_examples, "seq_len": seq_len, "num_letters": num_letters}
    for name, value in sizes.items():
        checks.check_whole(name, value, 1)
