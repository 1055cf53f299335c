"""Batches of texts as token ids: read, cut to a number of tokens, padded to a common length.

`Tokens.mask` says which tokens exist, and every measurement takes it.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from rank_collapse.struct import refuse, refuse_if
from rank_collapse.text.encoders import Encoder
from rank_collapse.text.files import read_table, read_utf8

TEXT_COLUMNS = ("sentence1", "sentence2", "sentence", "text")


class Tokens(NamedTuple):
    """A batch of texts as token ids; `mask` is False on padding."""

    ids: Int[np.ndarray, "b n"]
    mask: Bool[np.ndarray, "b n"]

    @property
    def lengths(self) -> Int[np.ndarray, "b"]:
        """Returns the number of tokens of each text."""
        return self.mask.sum(axis=-1)


def read_texts(
    path: str | os.PathLike, columns: Sequence[str] = (), limit: int | None = None
) -> list[str]:
    """Read the texts of a file: one per paragraph, or one per row of a table.

    Args:
        path: A .tsv with a header, or plain text whose paragraphs (separated by empty lines, or
            else lines) are the texts.
        columns: Columns of the table whose contents are joined; those of `TEXT_COLUMNS` that it
            has by default.
        limit: Number of texts at most.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not readable, not UTF-8, no text in it, or a column that the table does not
            have.
    """
    if Path(path).suffix.lower() == ".tsv":
        table = read_table(path)
        columns = columns or [c for c in TEXT_COLUMNS if c in table]
        absent = [c for c in columns if c not in table]
        if absent or not columns:
            wanted = repr(absent[0]) if absent else "of text"
            raise ValueError(f"{path} has no column {wanted}; its columns are {list(table)}")
        rows = zip(*(table[c] for c in columns), strict=True)
        texts = [" ".join(cell for cell in row if cell) for row in rows]
    else:
        content = read_utf8(path)
        blocks = content.split("\n\n") if "\n\n" in content.strip() else content.splitlines()
        texts = [" ".join(block.split()) for block in blocks]
    texts = [text for text in texts if text]
    refuse_if(not texts, f"{path} holds no text")
    return texts[:limit]


def read_ids(path: str | os.PathLike, limit: int | None = None) -> list[list[int]]:
    """Read ready token ids: one text per line, ids separated by spaces or commas.

    Args:
        path: Of the file.
        limit: Number of texts at most.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line with anything but integers, or no line at all.
    """
    return parse_ids(read_texts(path, limit=None), str(path))[:limit]


def parse_ids(texts: Iterable[str], where: str) -> list[list[int]]:
    """Parse token ids that are separated by spaces or commas, of each text.

    Args:
        texts: Such as "5, 8, 13".
        where: Names the texts in the message.

    Raises:
        ValueError: Anything but integers; it names where they stand.
    """
    try:
        return [[int(t) for t in text.replace(",", " ").split()] for text in texts]
    except ValueError as error:
        raise ValueError(f"{where} does not hold token ids: {error}") from None


def pad_sequences(sequences: Iterable[Sequence[int]], *, vocab_size: int = 2**31) -> Tokens:
    """Pad sequences of token ids on the right to the longest.

    Args:
        sequences: Of token ids.
        vocab_size: Above every id.

    Raises:
        ValueError: No sequence, an empty one, or an id outside of the vocabulary.
    """
    sequences = [list(s) for s in sequences]
    refuse_if(not sequences, "there are no texts")
    for i, s in enumerate(sequences):
        refuse_if(not s, f"text {i} has no tokens")
        worst = max(s) if min(s) >= 0 else min(s)
        refuse_if(
            not 0 <= worst < vocab_size,
            f"token id {worst} of text {i} is not below vocab_size={vocab_size}",
        )
    lengths = np.array([len(s) for s in sequences])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate(sequences)
    return Tokens(ids, mask)


def masked_copies(
    ids: Int[np.ndarray, "b n"],
    mask: Bool[np.ndarray, "b n"],
    token: int,
    copies: int,
    share: float = 0.15,
    seed: int = 0,
) -> tuple[Int[np.ndarray, "c n"], Bool[np.ndarray, "c n"]]:
    """Mask tokens in copies of each text; the copies mask different ones, as long as there are any.

    Never the first or the last token of a text, which close it in most models.

    Args:
        ids, mask: Of `Tokens`.
        token: The id that stands in a masked one's place.
        copies: Of each text, one after the other: c = b · copies.
        share: Of a text's tokens that each copy masks, at least one; 15 % as of BERT.

    Source: Devlin et al. 2019, task 1, with the token in all of the places.
    """
    draw, chosen = np.random.default_rng(seed), np.zeros((len(ids), copies, ids.shape[1]), bool)
    for text, count in zip(chosen, mask.sum(axis=1), strict=True):
        places = draw.permutation(np.arange(1, count - 1))
        size = max(1, round(share * len(places)))
        for copy, is_masked in enumerate(text):
            is_masked[np.take(places, np.arange(copy * size, (copy + 1) * size), mode="wrap")] = (
                True
            )
    chosen = chosen.reshape(-1, ids.shape[1])
    return np.where(chosen, token, np.repeat(ids, copies, axis=0)), chosen


def join_texts(texts: Sequence[str], encoder: Encoder, min_tokens: int, limit: int) -> list[str]:
    """Join consecutive texts until each has `min_tokens`; the remainder at the end is dropped.

    Args:
        texts: In order.
        encoder: Counts the tokens.
        min_tokens: Of each joined text.
        limit: Number of joined texts at most.
    """
    joined, parts, length = [], [], 0
    for text in texts:
        parts.append(text)
        length += len(encoder(text))
        if length >= min_tokens and len(encoder(" ".join(parts))) >= min_tokens:
            joined.append(" ".join(parts))
            parts, length = [], 0
        if len(joined) == limit:
            break
    refuse_if(not joined, f"all texts together have fewer than {min_tokens} tokens")
    return joined


def encode_texts(
    texts: Sequence[str],
    encoder: Encoder,
    *,
    max_tokens: int,
    num_positions: int = 0,
    vocab_size: int = 2**31,
) -> Tokens:
    """Encode texts as padded token ids, each cut to `max_tokens`, its last token kept.

    Args:
        texts: In order.
        encoder: text → token ids.
        max_tokens: Of each text.
        num_positions: Positions that the model has; 0 for any number.
        vocab_size: Above every id.

    Raises:
        ValueError: An empty text, or more tokens asked for than there are positions.
    """
    refuse(
        (max_tokens < 1, f"max_tokens={max_tokens} is not positive"),
        (
            num_positions and max_tokens > num_positions,
            f"max_tokens={max_tokens} is more than the {num_positions} positions",
        ),
    )
    sequences = []
    for i, text in enumerate(texts):
        refuse_if(not text.strip(), f"text {i} is empty")
        sequences.append(cut_text(encoder(text), max_tokens))
    return pad_sequences(sequences, vocab_size=vocab_size)


def cut_text(ids: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Cuts a text to a number of tokens, its last token kept: it closes a text in most models."""
    return ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]]
