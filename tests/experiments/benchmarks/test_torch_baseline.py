"""Batches of the PyTorch baseline."""

from types import SimpleNamespace

import numpy as np
import pytest


def test_batches_of_pytorch_end_at_their_longest_text():
    pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    lengths = np.array([3, 5, 2, 4, 1])
    mask = np.arange(8) < lengths[:, None]
    tokens = np.where(mask, 10 * np.arange(5)[:, None] + np.arange(8), -1)
    task = SimpleNamespace(device="cpu", arrays=[tokens, tokens, mask], shuffle=False, batch_size=2)
    batches = torch_baseline.list_batches(task)
    shapes = [tuple(next(batches)[0].shape) for _ in range(4)]
    assert shapes == [(2, 5), (2, 4), (1, 1), (2, 5)]
    inputs, labels, batch_mask = next(batches)
    assert inputs[1].tolist() == labels[1].tolist() == [30, 31, 32, 33]
    assert batch_mask.sum(1).tolist() == [2, 4]
