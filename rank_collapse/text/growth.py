"""Checks how long a text becomes when a tokenizer normalises it, before it splits the text.

The replacements that the files of a tokenizer ask for may have any size. The package `tokenizers`
ends the process where the memory is not enough, which nothing can catch.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rank_collapse.checks import refuse_if
from rank_collapse.extras import import_package

MOST_LETTERS = 20_000_000  # of a text as its tokenizer splits it: about 0.4 GB there
_FOLDED = 18  # letters that Unicode makes of one at most, in NFKC
_GROWTH = {"NFKC": _FOLDED, "NFKD": _FOLDED, "Precompiled": _FOLDED, "NFC": 3, "NFD": 4}
_GROWTH |= {"BertNormalizer": 12, "ByteLevel": 4, "Lowercase": 3}


def check_growth(tokenizer: object, text: str) -> None:
    """Check that the normalizers of a tokenizer do not make a text too long.

    Args:
        tokenizer: Tokenizer of the package `tokenizers`.
        text: Text to encode.

    Raises:
        ValueError: They may make more than `MOST_LETTERS` letters of it.
    """
    normalizer = getattr(tokenizer, "normalizer", None)
    if normalizer is None:
        return
    steps = list(_list_steps(json.loads(normalizer.__getstate__())))
    original_length = length = len(text)
    for step in steps:
        length = _bound_length(step, length, None)
    if length <= MOST_LETTERS:
        return
    step_normalizer = import_package("tokenizers", "a tokenizer", "pretrained").normalizers.NFC()
    for step in steps:  # such bounds are far too large: what each step makes of this text counts
        length = _bound_length(step, len(text), text)
        refuse_if(
            length > MOST_LETTERS,
            f"its normalizers may make {length} letters of a text of {original_length}, more than "
            f"{MOST_LETTERS}",
        )
        step_normalizer.__setstate__(json.dumps(step).encode())
        text = step_normalizer.normalize_str(text)


def _list_steps(normalizer: Mapping[str, object]) -> Iterator[Mapping[str, Any]]:
    """Yield the normalizers of a sequence, and those of sequences inside it."""
    if normalizer.get("type") != "Sequence":
        yield normalizer
        return
    for inner in normalizer["normalizers"]:
        yield from _list_steps(inner)


def _bound_length(step, length, text):
    """Return how many letters a normalizer makes at most of a text.

    Args:
        step: Normalizer, as in tokenizer.json.
        length: Length of the text.
        text: The text if known, for the number of its matches.
    """
    kind = step.get("type")
    if kind == "Prepend":
        return length + len(step["prepend"])
    if kind != "Replace":
        return length * _GROWTH.get(kind, 1)
    pattern, new = step["pattern"].get("String", ""), len(step["content"])
    if not pattern:  # a regular expression may match at every place, and nothing there
        return length + (length + 1) * new
    count = length // len(pattern) if text is None else text.count(pattern)
    return length + count * max(0, new - len(pattern))
