"""Sequence tasks against Python's own lists."""

import jax
import numpy as np
import pytest

from rank_collapse.training.tasks import sequences
from rank_collapse.training.tasks.sequences import BEGIN, END, NUM_MARKS, PAD

ORACLES = {"copy": list, "reverse": lambda a: a[::-1], "sort": sorted}


@pytest.mark.parametrize("task", sequences.TASKS)
def test_labels_are_the_letters_of_the_transformed_sequence(task):
    data = sequences.make_examples(jax.random.key(0), 20, 16, 10, task)
    assert data.inputs.shape == (20, 16) and set(np.unique(data.inputs)) == set(range(10))
    for letters, labels in zip(data.inputs.tolist(), data.labels.tolist(), strict=True):
        assert labels == ORACLES[task](letters)


@pytest.mark.parametrize("task", sequences.TASKS)
def test_targets_stand_between_marks_and_padding_behind_them(task):
    data = sequences.make_pairs(jax.random.key(1), 40, 6, 4, task, min_len=2)
    assert data.source.shape == (40, 6) and data.target.shape == (40, 8) and len(data) == 40
    lengths = data.source_mask.sum(axis=1)
    assert set(lengths.tolist()) == {2, 3, 4, 5, 6}
    for i, n in enumerate(lengths.tolist()):
        source, target = data.source[i].tolist(), data.target[i].tolist()
        assert source[n:] == [PAD] * (6 - n) and min(source[:n]) >= NUM_MARKS
        assert max(source) < NUM_MARKS + 4
        assert target == [BEGIN, *ORACLES[task](source[:n]), END] + [PAD] * (6 - n)
        assert data.source_mask[i].tolist() == [True] * n + [False] * (6 - n)
        assert data.target_mask[i].tolist() == [True] * (n + 2) + [False] * (6 - n)
    np.testing.assert_array_equal(data.inputs[:, 1:], data.labels[:, :-1])
    assert (data.inputs[:, 0] == BEGIN).all() and len(data.first(3)) == 3
    assert (data.mask.sum(axis=1) == lengths + 1).all()  # the letters and the end mark


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"seq_len": 0}, "seq_len=0 leaves no token beside its marks"),
        ({"min_len": 0}, "min_len=0 leaves no token beside its marks"),
        ({"min_len": 7}, "min_len=7 is larger than seq_len=6"),
        ({"num_letters": 0}, "num_letters=0 leaves no letter"),
        ({"task": "shuffle"}, "task='shuffle' is not one of"),
    ],
)
def test_bad_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        sequences.make_pairs(
            jax.random.key(0), 2, **{"seq_len": 6, "num_letters": 4, "task": "copy"} | sizes
        )
