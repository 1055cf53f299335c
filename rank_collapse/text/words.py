"""Words: token ids of any text without a tokenizer, and the text shipped with the package."""

import os
import re
from importlib import resources

import numpy as np

from rank_collapse.text.files import read_utf8

WORD = re.compile(r"\w+|[^\w\s]")


def default_text() -> str:
    """Returns the English text shipped with the package (about 500 tokens, written for it)."""
    return resources.files("rank_collapse").joinpath("data/english.txt").read_text("utf-8")


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
    """Number the first tokens of a text by the vocabulary of just these tokens.

    A token's id is the rank of its first appearance, so a longer excerpt begins with the same ids.

    Args:
        text: Any.
        num_tokens: At most.

    A token's id is the rank of its first appearance, so a longer excerpt begins with the same ids.

    Returns:
        Int [n] ids and the vocabulary, ids[i] being the place of token i in it.

    Raises:
        ValueError: Fewer than 2 tokens: a residual needs at least two.
    """
    tokens = tokenize(text)[: max(num_tokens, 0)]
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} tokens are fewer than 2, which a residual needs")
    vocabulary = list(dict.fromkeys(tokens))
    place = {token: i for i, token in enumerate(vocabulary)}
    return np.array([place[token] for token in tokens], np.int32), vocabulary


def cut_windows(text: str, count: int, words: int) -> list[str]:
    """Cut pieces of `words` words, their beginnings spread evenly over the text; they may overlap.

    Args:
        text: Any.
        count: Pieces at most.
        words: Of each.
    """
    split = text.split()
    last = max(len(split) - words, 0)
    starts = np.unique(np.linspace(0, last, count).astype(int))
    return [" ".join(split[s : s + words]) for s in starts]
