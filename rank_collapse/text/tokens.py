"""Batches of texts as token ids: read, cut to a number of tokens, padded to a common length.

`Tokens.mask` says which tokens exist, and every measurement takes it.
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from rank_collapse.checks import refuse_if
from rank_collapse.text.text_files import read_table, read_utf8

TEXT_COLUMNS = ("sentence1", "sentence2", "sentence", "text")


class Tokens(NamedTuple):
    """A batch of texts as token ids; `mask` is False on padding."""

    ids: Int[np.ndarray, "b n"]
    mask: Bool[np.ndarray, "b n"]

    @property
    def lengths(self) -> Int[np.ndarray, "b"]:
        """Return the number of tokens of each text."""
        return self.mask.sum(axis=-1)


def read_texts(
    path: str | os.PathLike, columns: Sequence[str] = (), limit: int | None = None
) -> list[str]:
    """Read the texts of a file: one per paragraph, or one per row of a table.

    Args:
        path: A .tsv with a header, or plain text whose paragraphs (separated by empty lines, or
            else lines) are the texts.
        columns: Columns of the table whose contents are joined; by default those of `TEXT_COLUMNS`
            that the table has.
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
        content = read_utf8(path).strip()
        paragraphs = re.split(r"\n\s*\n", content)  # an empty line may have spaces
        blocks = paragraphs if len(paragraphs) > 1 else content.split("\n")
        texts = [" ".join(block.split()) for block in blocks]
    texts = [text for text in texts if text]
    refuse_if(not texts, f"{path} holds no text")
    return texts[:limit]


def read_ids(path: str | os.PathLike, limit: int | None = None) -> list[list[int]]:
    """Read ready token ids: one text per line, ids separated by spaces or commas.

    Args:
        path: Path of the file.
        limit: Number of texts at most.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line with anything but integers, or no line at all.
    """
    return parse_ids(read_texts(path, limit=None), str(path))[:limit]


def parse_ids(texts: Iterable[str], where: str) -> list[list[int]]:
    """Parse token ids that are separated by spaces or commas, of each text.

    Args:
        texts: Texts of token ids, such as "5, 8, 13".
        where: Name of the texts in the message.

    Raises:
        ValueError: Entries that are not integers, such as between two commas; the message names
            their position.
    """
    try:
        return [[int(t) for t in re.split(r"\s*,\s*|\s+", text.strip())] for text in texts]
    except ValueError as error:
        raise ValueError(f"{where} does not hold token ids: {error}") from None


def pad_sequences(sequences: Iterable[Sequence[int]], *, vocab_size: int = 2**31) -> Tokens:
    """Pad sequences of token ids on the right to the longest.

    Args:
        sequences: Sequences of token ids.
        vocab_size: Number that is larger than every id.

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


def cut_text(ids: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Cut a text to a number of tokens and keep its last token, which closes a text in most
    models."""
    return ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]]
