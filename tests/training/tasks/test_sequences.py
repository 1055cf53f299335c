"""Tasks on sequences of letters: labels, targets, marks and padding."""

import jax
import numpy as np
import pytest

from rank_collapse.training.tasks import sequences
from rank_collapse.training.tasks.sequences import BEGIN, END, NUM_MARKS, PAD
from tests.support.on_host import on_host
from tests.support.refusals import is_refused, parametrize_refusals

make_examples, make_pairs = on_host(sequences.make_examples), on_host(sequences.make_pairs)


ORACLES = {"copy": list, "reverse": lambda a: a[::-1], "sort": sorted}


@pytest.mark.parametrize("task", sequences.TASKS)
def test_labels_are_the_letters_of_the_transformed_sequence(task):
    data = make_examples(jax.random.key(0), 20, 16, 10, task)
    assert data.inputs.shape == (20, 16) and set(np.unique(data.inputs)) == set(range(10))
    for letters, labels in zip(data.inputs.tolist(), data.labels.tolist(), strict=True):
        assert labels == ORACLES[task](letters)


@pytest.mark.parametrize("task", sequences.TASKS)
def test_targets_stand_between_marks_and_padding_behind_them(task):
    data = make_pairs(jax.random.key(1), 40, 6, 4, task, min_len=2)
    assert data.source.shape == (40, 6) and data.target.shape == (40, 8) and len(data) == 40
    lengths = data.source_mask.sum(axis=1)
    assert set(lengths.tolist()) == {2, 3, 4, 5, 6}
    assert set(data.source[data.source_mask].tolist()) == set(range(NUM_MARKS, NUM_MARKS + 4))
    for i, n in enumerate(lengths.tolist()):
        source, target = data.source[i].tolist(), data.target[i].tolist()
        assert source[n:] == [PAD] * (6 - n) and min(source[:n]) >= NUM_MARKS
        assert max(source) < NUM_MARKS + 4
        assert target == [BEGIN, *ORACLES[task](source[:n]), END] + [PAD] * (6 - n)
        assert data.source_mask[i].tolist() == [True] * n + [False] * (6 - n)
        assert data.target_mask[i].tolist() == [True] * (n + 2) + [False] * (6 - n)
    np.testing.assert_array_equal(data.inputs[:, 1:], data.labels[:, :-1])
    assert (data.inputs[:, 0] == BEGIN).all() and len(data.first(3)) == 3
    seeds = jax.tree.map(lambda a: np.stack([a, a]), data)  # with an axis of seeds before
    assert len(seeds) == 40 and seeds.first(3).target.shape == (2, 3, 8)
    assert (data.mask.sum(axis=1) == lengths + 1).all()  # the letters and the end mark
    assert make_pairs(jax.random.key(1), 40, 6, 4, task).source_mask.all()


def test_lengths_are_not_drawn_with_the_key_of_letters():
    """Four lengths and four letters: of one key, lengths would be the first letters."""
    full, cut = (make_pairs(jax.random.key(1), 40, 6, 4, "copy", min_len=least) for least in (6, 3))
    letters, lengths = full.source.ravel()[:40] - NUM_MARKS, cut.source_mask.sum(axis=1)
    assert (letters == lengths - 3).mean() < 0.6


@parametrize_refusals(
    [
        ({"seq_len": 0}, "seq_len=0 is not a whole number from 1 on"),
        ({"min_len": 0}, "min_len=0 is not a whole number from 1 to"),
        ({"min_len": 7}, "min_len=7 is not a whole number from 1 to 6"),
        ({"num_letters": 0}, "num_letters=0 is not a whole number from 1 on"),
        ({"num_examples": 0}, "num_examples=0 is not a whole number from 1 on"),
        ({"task": "shuffle"}, "task='shuffle' is not one of"),
    ]
)
def test_bad_sizes_are_named(arguments, message):
    (sizes,) = arguments
    is_refused(
        message,
        lambda: sequences.make_pairs(
            jax.random.key(0),
            **{"num_examples": 2, "seq_len": 6, "num_letters": 4, "task": "copy"} | sizes,
        ),
    )
