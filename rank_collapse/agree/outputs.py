"""How the recorded logits of two runs differ."""

import numpy as np

from rank_collapse.agree.alignment import Alignment
from rank_collapse.agree.recording import Recording


def compare_outputs(first: Recording, second: Recording, alignment: Alignment) -> dict[str, float]:
    """Compare the logits of tokens that exist.

    Args:
        first, second: The recordings.
        alignment: The alignment of the tokens of both recordings.

    Returns:
        {description: number}; {} where one run has no logits.

    Raises:
        ValueError: The logits have different numbers of entries.
    """
    logits = [recording.read_logits() for recording in (first, second)]
    if any(values is None for values in logits):
        return {}
    if logits[0].shape[-1] != logits[1].shape[-1]:
        raise ValueError(f"logits have {logits[0].shape[-1]} and {logits[1].shape[-1]} entries")
    chosen = [
        np.take_along_axis(values, positions[..., None], axis=1)[alignment.mask]
        for values, positions in zip(logits, (alignment.first, alignment.second), strict=True)
    ]
    log_p = [values - _log_sum_exp(values) for values in chosen]
    next_token = chosen[0].argmax(axis=-1)
    rows = np.arange(len(next_token))
    change = np.abs(log_p[1][rows, next_token] - log_p[0][rows, next_token])
    return {
        "share of next tokens that differ": float(np.mean(next_token != chosen[1].argmax(axis=-1))),
        "mean change of their log-probability": float(change.mean()),
        "largest change of their log-probability": float(change.max()),
    }


def _log_sum_exp(values):
    """Return log Σ exp over the last axis, which stays."""
    most = values.max(axis=-1, keepdims=True)
    return most + np.log(np.exp(values - most).sum(axis=-1, keepdims=True))
