"""The text shipped with the package, and pieces of a text."""

from importlib import resources

import numpy as np


def default_text() -> str:
    """Return the English text shipped with the package (about 500 tokens, written for it)."""
    return resources.files("rank_collapse").joinpath("data/english.txt").read_text("utf-8")


def cut_windows(text: str, count: int, words: int) -> list[str]:
    """Cut pieces of `words` words, their beginnings spread evenly over the text; they may overlap.

    Args:
        text: The text.
        count: Pieces at most.
        words: Words of each.
    """
    split = text.split()
    last = max(len(split) - words, 0)
    starts = np.unique(np.linspace(0, last, count).astype(int))
    return [" ".join(split[s : s + words]) for s in starts]
