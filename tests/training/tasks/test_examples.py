"""Data, labels, losses, metrics and baselines of the tasks: against slow oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from rank_collapse.training.tasks import examples
from rank_collapse.training.tasks.examples import cross_entropy
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused


@jax.jit
def read_parts(ids):
    return examples.part_positions(ids), examples.part_mask(ids)


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_packed_rows_hold_every_token_once_and_whole(lengths):
    lengths = np.array(lengths)
    parts, places = np.moveaxis(examples.packed_rows(lengths, 7), -1, 0)
    taken = [(int(t), int(p)) for t, p in zip(parts.ravel(), places.ravel(), strict=True) if t >= 0]
    assert sorted(taken) == [(t, p) for t, n in enumerate(lengths) for p in range(n)]
    for row, within in zip(parts, places, strict=True):
        assert len(set(row[row >= 0])) == np.sum(within[row >= 0] == 0)  # no sequence is split
        positions, mask = jax.device_get(read_parts(row))
        np.testing.assert_array_equal(positions[row >= 0], within[row >= 0])
        expected = (row[:, None] == row[None, :]) & (row[None, :] >= 0)
        np.testing.assert_array_equal(mask, expected)
    free = 7 - (parts >= 0).sum(axis=1)
    assert np.sum(free >= 4) <= 1  # two half-empty rows would have been one


def test_the_longest_sequence_comes_first_and_fills_the_first_row_with_enough_places():
    parts, places = np.moveaxis(examples.packed_rows(np.array([3, 1, 4, 2, 4]), 7), -1, 0)
    assert parts.tolist() == [[2] * 4 + [0] * 3, [4] * 4 + [3] * 2 + [1]]
    assert places.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 0, 1, 0]]
    parts, _ = np.moveaxis(examples.packed_rows(np.array([2, 2]), 3), -1, 0)
    assert parts.tolist() == [[0, 0, -1], [1, 1, -1]]


def test_packed_examples_hold_the_tokens_labels_and_places_of_each_sequence():
    ids = jnp.array([[5, 6, 7], [8, 0, 0], [1, 2, 0]])
    padded = examples.Examples(ids, ids + 10, ids > 0)
    packed = examples.pack_examples(padded, examples.packed_rows(np.array([3, 1, 2]), 4))
    assert packed.inputs[0].tolist() == [5, 6, 7, 8] and packed.inputs[1, :2].tolist() == [1, 2]
    np.testing.assert_array_equal(packed.labels, packed.inputs + 10)
    assert packed.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert packed.parts.tolist() == [[0, 0, 0, 1], [2, 2, -1, -1]]
    assert len(packed) == 2 and packed.first(1).parts.tolist() == [[0, 0, 0, 1]]
    plain = examples.Examples(ids, ids)
    assert examples.token_mask(plain).tolist() == [[True] * 3] * 3
    assert examples.token_mask(padded).tolist() == (ids > 0).tolist()


def test_a_sequence_longer_than_a_row_is_refused():
    is_refused("9 tokens does not fit width=8", examples.packed_rows, np.array([3, 9]), 8)


def masked_data(seed=0, shape=(6, 5), classes=3):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*shape, classes)).astype(np.float32)
    labels = rng.integers(0, classes, shape)
    mask = rng.random(shape) < 0.7
    data = examples.Examples(
        inputs=jnp.zeros(shape, jnp.int32), labels=jnp.asarray(labels), mask=jnp.asarray(mask)
    )
    return jnp.asarray(logits), data, labels, mask


def test_losses_and_metrics_match_numpy_with_a_mask():
    logits, data, labels, mask = masked_data()
    z = np.asarray(logits, float)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    nll = -np.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        examples.cross_entropy(logits, data.labels, data.mask), nll[mask].mean(), rtol=1e-5
    )
    np.testing.assert_allclose(examples.loss_metric(logits, data), nll[mask].mean(), rtol=1e-5)
    parts = np.where(mask, np.linspace(0.1, 2.0, mask.size).reshape(mask.shape), 0)
    weighted = examples.cross_entropy(logits, data.labels, jnp.asarray(parts, jnp.float32))
    np.testing.assert_allclose(weighted, np.average(nll, weights=parts), rtol=1e-5)
    right = z.argmax(axis=-1) == labels
    np.testing.assert_allclose(examples.token_accuracy(logits, data), right[mask].mean(), rtol=1e-6)
    exact = np.mean([r[m].all() for r, m in zip(right, mask, strict=True)])
    assert_close(examples.exact_match(logits, data), exact)
    target = jnp.asarray(np.random.default_rng(1).normal(size=z.shape), jnp.float32)
    expected = ((z - np.asarray(target)) ** 2).sum(axis=-1)[mask].sum()
    np.testing.assert_allclose(
        examples.squared_error(logits, target, data.mask), expected, rtol=1e-5
    )


def test_a_token_of_weight_zero_may_be_infinite():
    logits, data, *_ = masked_data()
    bad = jnp.where(data.mask[..., None], logits, jnp.nan)
    expected = examples.cross_entropy(logits, data.labels, data.mask)
    assert_close(examples.cross_entropy(bad, data.labels, data.mask), expected)


def test_area_under_curve_counts_pairs_and_ties():
    logits, data, labels, mask = masked_data(classes=2)
    logits = jnp.round(logits * 2) / 2  # ties
    score = np.asarray(logits[..., 1] - logits[..., 0])[mask]
    kind = labels[mask]
    pairs = [(p > q) + 0.5 * (p == q) for p in score[kind == 1] for q in score[kind == 0]]
    np.testing.assert_allclose(examples.area_under_curve(logits, data), np.mean(pairs), rtol=1e-6)
    assert 0 < np.mean(pairs) < 1 and any(p == 0.5 for p in pairs)


@pytest.mark.full
def test_baselines_are_measured():
    _, data, labels, mask = masked_data(shape=(400, 5))
    commonest = np.bincount(labels[mask]).argmax()
    other = masked_data(seed=5, shape=(300, 5))
    expected = (other[2][other[3]] == commonest).mean()
    measured = examples.majority_baseline(data, other[1], 3)
    np.testing.assert_allclose(measured, expected, rtol=1e-6)
    count = mask.sum()
    for label in (0, 2):  # of tokens that exist; others are never answered right
        one = data.replace(labels=jnp.where(data.mask, label, -1))
        value = float(examples.random_baseline(jax.random.key(0), one, 3))
        assert abs(value - 1 / 3) < 4 * np.sqrt(2 / 9 / count)
    few = examples.Examples(
        None, jnp.array([[1, 1, 1, 0]]), jnp.array([[True, False, False, True]])
    )
    train = few.replace(labels=jnp.array([[2, 1, 1, 2]]), inputs=few.labels)
    held_out = few.replace(labels=jnp.array([[2, 2, 1, 0]]))
    assert examples.majority_baseline(train, held_out, 3) == 0.5


# The made-up translation against a translator that reads the source as a grammar book says.


SIZES = {"num_examples": 2, "seq_len": 6, "num_letters": 4, "task": "copy"}


@pytest.mark.full
def test_label_smoothing_is_the_cross_entropy_of_smoothed_labels():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 5, (3, 4)))
    weights = jnp.asarray(rng.integers(0, 2, (3, 4)), bool)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 5), 0.1)
    expected = (optax.softmax_cross_entropy(logits, smooth) * weights).sum() / weights.sum()
    loss = cross_entropy(logits, labels, weights, jnp.float32(0.1))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    none, zero = (cross_entropy(logits, labels, weights, s) for s in (0.0, jnp.float32(0)))
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    assert none == zero == jnp.sum(jnp.where(weights, plain, 0)) / weights.sum()
