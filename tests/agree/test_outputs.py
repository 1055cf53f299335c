"""Differences of logits, by a loop over the tokens that exist."""

import numpy as np
import pytest

from rank_collapse.agree.alignment import align_tokens
from rank_collapse.agree.outputs import compare_outputs
from rank_collapse.agree.recording import open_recording, record
from tests.support.refusals import is_refused


def write(path, residual, mask, **arrays):
    record({"residual": residual}, path, mask=mask.astype("uint8"), **arrays)
    return open_recording(path)


def test_logits_are_compared_token_by_token(tmp_path):
    """Of two examples of several lengths, padded on the right in one run, on the left in the
    other; some tokens are ruled out by −∞."""
    rng = np.random.default_rng(0)
    lengths, n, v = (5, 3), 6, 9
    mask = np.arange(n) < np.array(lengths)[:, None]
    residual, logits = rng.normal(size=(3, 2, n, 4)), rng.normal(size=(2, n, v))
    logits[0, 1, 2] = -np.inf
    changed = logits + rng.normal(size=logits.shape)
    logits[~mask] = np.nan
    shift = [np.roll(a, n - length, axis=-2) for a, length in zip(changed, lengths, strict=True)]
    moved = [np.roll(residual[:, b], n - length, axis=-2) for b, length in enumerate(lengths)]
    first = write(tmp_path / "a.npz", residual, mask, logits=logits)
    second = write(
        tmp_path / "b.npz", np.stack(moved, axis=1), mask[:, ::-1], logits=np.stack(shift)
    )
    answer = compare_outputs(first, second, align_tokens(first, second))
    differ, changes = [], []
    for b, length in enumerate(lengths):
        for token in range(length):
            p, q = (a[b, token] - np.log(np.exp(a[b, token]).sum()) for a in (logits, changed))
            differ.append(p.argmax() != q.argmax())
            changes.append(abs(p.max() - q[p.argmax()]))
    assert 0 < np.mean(differ) < 1
    assert answer == pytest.approx(
        {
            "share of next tokens that differ": np.mean(differ),
            "mean change of their log-probability": np.mean(changes),
            "largest change of their log-probability": np.max(changes),
        },
        rel=1e-5,
    )


def test_logits_of_one_run_alone_are_not_compared_and_others_refused(tmp_path):
    rng, mask = np.random.default_rng(0), np.ones((1, 4), bool)
    residual, logits = rng.normal(size=(3, 1, 4, 4)), rng.normal(size=(1, 4, 6))
    first = write(tmp_path / "a.npz", residual, mask, logits=logits)
    none = write(tmp_path / "b.npz", residual, mask)
    fewer = write(tmp_path / "c.npz", residual, mask, logits=logits[..., :5])
    assert compare_outputs(first, none, align_tokens(first, none)) == {}
    assert compare_outputs(none, first, align_tokens(none, first)) == {}
    alignment = align_tokens(first, fewer)
    is_refused("logits have 6 and 5 entries", compare_outputs, first, fewer, alignment)
