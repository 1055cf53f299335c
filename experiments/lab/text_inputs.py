"""Texts of an experiment: their words numbered; joined to a length, encoded."""

import os
import re
from collections.abc import Sequence

import numpy as np

from rank_collapse.checks import refuse, refuse_if
from rank_collapse.printed import format_count
from rank_collapse.text.encoders import Encoder
from rank_collapse.text.text_files import read_utf8
from rank_collapse.text.tokens import Tokens, cut_text, pad_sequences

WORD = re.compile(r"\w+|[^\w\s]")


def read_text(path: str | os.PathLike) -> str:
    """Read the text of a UTF-8 file.

    Raises:
        ValueError: An empty file; see also `read_utf8`.
    """
    text = read_utf8(path)
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def tokenize(text: str) -> list[str]:
    """Split text into lower-case words and single punctuation marks, in order."""
    return WORD.findall(text.lower())


def token_ids(text: str, num_tokens: int) -> tuple[np.ndarray, list[str]]:
    """Number the first tokens of a text by the vocabulary of only these tokens.

    A token's id is the rank of its first appearance, so a longer excerpt begins with the same ids.

    Args:
        text: The text.
        num_tokens: At most.

    Returns:
        Int [n] ids and the vocabulary, ids[i] being the place of token i in it.

    Raises:
        ValueError: Fewer than 2 tokens: a residual needs at least two.
    """
    tokens = tokenize(text)[: max(num_tokens, 0)]
    if len(tokens) < 2:
        counted = format_count(len(tokens), "token")
        raise ValueError(f"the text has {counted}, fewer than the 2 that a residual needs")
    vocabulary = list(dict.fromkeys(tokens))
    place = {token: i for i, token in enumerate(vocabulary)}
    return np.array([place[token] for token in tokens], np.int32), vocabulary


def join_texts(texts: Sequence[str], encoder: Encoder, min_tokens: int, limit: int) -> list[str]:
    """Join consecutive texts until each has `min_tokens`; the remainder at the end is dropped.

    Args:
        texts: Texts in order.
        encoder: Counts the tokens.
        min_tokens: Least number of tokens in each joined text.
        limit: Largest number of joined texts.
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
        texts: Texts in order.
        encoder: text → token ids.
        max_tokens: Largest number of tokens in each text.
        num_positions: Positions that the model has; 0 for any number.
        vocab_size: Number that is larger than every id.

    Raises:
        ValueError: An empty text, or more tokens than there are positions.
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
