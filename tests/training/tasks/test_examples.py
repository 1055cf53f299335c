"""Data, labels, losses, metrics and baselines of the tasks: against slow oracles."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.spatial import ConvexHull

from experiments import run_convex_hull as convex_hull, run_memorization as memorization
from experiments.note import transformer_grammar as grammar
from experiments.note.transformer_grammar import FIRST_WORD, PLURAL
from experiments.paper.circle import walks as circle
from experiments.train import sorting
from rank_collapse.training.tasks import examples, sequences
from rank_collapse.training.tasks.sequences import BEGIN, END, NUM_MARKS, PAD
from tests.support.closeness import assert_close
from tests.support.on_host import on_host
from tests.support.refusals import is_refused, parametrize_refusals


def rational_hull(points) -> np.ndarray:
    """Labels points on the boundary, in rational arithmetic: all points on one side of a line."""
    points = [(Fraction(float(x)), Fraction(float(y))) for x, y in points]

    def cross(p, q, r):
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return np.array(
        [
            all(r == p for r in points)
            or any(q != p and all(cross(p, q, r) >= 0 for r in points) for q in points)
            for p in points
        ],
        int,
    )


hull = jax.jit(jax.vmap(convex_hull.hull_labels))


def test_hull_with_ties_lines_and_repeats_is_exact():
    points = np.random.default_rng(1).integers(0, 4, (150, 9, 2))
    expected = np.array([rational_hull(x) for x in points])
    np.testing.assert_array_equal(hull(jnp.asarray(points)), expected)


@pytest.mark.parametrize(
    "points", [[[1, 1]] * 4, [[0, 0], [1, 1], [2, 2], [1, 1]], [[0, 0], [3, 1]]]
)
def test_degenerate_hulls_hold_all_their_points(points):
    assert hull(np.array([points])).tolist() == [[1] * len(points)]


def test_hull_examples_are_labelled_before_the_shift_and_fill_the_square():
    data = on_host(convex_hull.make_examples)(jax.random.key(0), 300, 10)
    assert data.inputs.shape == (300, 10, 2) and data.labels.shape == (300, 10)
    extent = np.ptp(np.asarray(data.inputs), axis=1)
    assert 8 < extent.mean() < 9 and extent.max() <= 10.0001  # E = 10 · 9/11
    scipy_labels = np.zeros((300, 10), int)
    for row, x in zip(scipy_labels, np.asarray(data.inputs, float), strict=True):
        row[ConvexHull(x).vertices] = 1
    assert (np.asarray(data.labels) == scipy_labels).mean() > 0.999
    assert 2.5 < np.asarray(data.inputs).mean(axis=1).std() < 4.5  # the shift of 3.3


def test_sorted_labels_and_repeats():
    data = on_host(sorting.make_examples)(jax.random.key(0), 200, 8, 10)
    np.testing.assert_array_equal(data.labels, np.sort(data.inputs, axis=1))
    counts = np.bincount(np.asarray(data.inputs).ravel(), minlength=10)
    assert len(counts) == 10 and np.abs(counts - 160).max() < 5 * np.sqrt(160)
    assert any(len(set(row)) < 8 for row in data.inputs.tolist())
    distinct = on_host(sorting.make_examples)(jax.random.key(0), 50, 8, 10, repeats=False)
    assert all(len(set(row)) == 8 for row in distinct.inputs.tolist())
    is_refused("seq_len=11", sorting.make_examples, jax.random.key(0), 5, 11, 10, repeats=False)


def test_misordered_pairs_counts_by_hand():
    predicted = jnp.asarray([[1, 2, 3], [3, 2, 1], [1, 1, 0]])
    assert float(sorting.misordered_pairs(predicted)) == pytest.approx((0 + 3 + 2) / 3)
    assert float(sorting.misordered_pairs(predicted, repeats=False)) == pytest.approx(6 / 3)


def test_circle_walks_step_by_step_on_the_two_halves():
    data = circle.make_examples(1000)
    assert data.inputs.shape == (499, 2, 2)
    np.testing.assert_array_equal(data.inputs[1:], data.labels[:-1])
    radius = np.linalg.norm(np.asarray(data.inputs), axis=-1)
    np.testing.assert_allclose(radius, 0.3, rtol=1e-5)
    angle = 2 * np.pi / 1000
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    assert_close(data.labels, np.asarray(data.inputs) @ turn, atol=1e-6)
    is_refused("num_points=3", circle.make_examples, 3)


def test_roll_out_feeds_back_the_output_or_its_sum():
    start = jnp.asarray([[1.0, 0.0], [0.0, 2.0]])
    path = circle.roll_out(lambda x: 0.5 * x, start, 4)
    assert_close(path[:, 0, 0], [1, 0.5, 0.25, 0.125])
    path = circle.roll_out(lambda x: 0.5 * x, start, 4, skip=True)
    assert_close(path[:, 0, 0], [1, 0.5, 0.75, 1.125])
    assert_close(circle.distance(path)[0], np.sqrt(5))


def test_batch_before_is_added_in_the_order_of_training():
    walk = circle.make_examples(22)  # 10 examples in batches of 4, 4 and 2
    with_before = circle.add_batch_before(walk, 4)
    x, before = np.asarray(walk.inputs), np.zeros((4, 2, 2))
    for begin in range(0, 10, 4):
        batch = x[begin : begin + 4]
        wanted = batch + before[: len(batch)]
        np.testing.assert_array_equal(with_before.inputs[begin : begin + 4], wanted)
        before = batch
    np.testing.assert_array_equal(with_before.labels, walk.labels)


def test_head_gap_by_hand():
    weights = jnp.asarray([[[0.75, 0.25], [0.5, 0.5]], [[0.125, 0.875], [1.0, 0.0]]])
    np.testing.assert_array_equal(circle.head_gap(weights), [0.25, -0.875])


def test_compact_vocabulary_keeps_the_texts():
    tokens = np.array([[7, 100, 7], [0, 3, 100]])
    compact, used = memorization.compact_vocabulary(tokens)
    np.testing.assert_array_equal(used[compact], tokens)
    assert compact.max() == len(used) - 1 == 3


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


def translate(sentence, lexicon):
    """Translates a sentence word by word into token ids."""
    nouns, verbs = grammar.NOUNS, grammar.VERBS
    noun_of, verb_of, adjective_of, gender_of = (
        np.asarray(a).tolist()
        for a in (lexicon.nouns, lexicon.verbs, lexicon.adjectives, lexicon.genders)
    )
    words = list(sentence)

    def read_phrase():
        adjective = None
        if words[0] - FIRST_WORD >= nouns + verbs:
            adjective = words.pop(0) - FIRST_WORD - nouns - verbs
        noun = words.pop(0) - FIRST_WORD
        assert 0 <= noun < nouns
        plural = bool(words) and words[0] == PLURAL
        if plural:
            words.pop(0)
        out = [FIRST_WORD + 2 * noun_of[noun] + plural]
        if adjective is not None:
            word = 2 * (nouns + verbs + adjective_of[adjective]) + gender_of[noun]
            out.append(FIRST_WORD + word)
        return out, plural

    subject, plural = read_phrase()
    verb = words.pop(0) - FIRST_WORD - nouns
    assert 0 <= verb < verbs
    object_, _ = read_phrase()
    assert not words
    return [BEGIN, FIRST_WORD + 2 * (nouns + verb_of[verb]) + plural, *subject, *object_, END]


def test_every_target_is_the_translation_of_its_source():
    lexicon = jax.jit(grammar.make_lexicon)(jax.random.key(4))
    sizes = [sorted(words.tolist()) for words in (lexicon.nouns, lexicon.verbs, lexicon.adjectives)]
    assert sizes == [list(range(12)), list(range(6)), list(range(6))]
    assert lexicon.genders.sum() == 6
    pairs = jax.jit(lambda k: grammar.make_pairs(k, 200, lexicon))(jax.random.key(0))
    assert pairs.source.shape == (200, 7) and pairs.target.shape == (200, 7)
    lengths = set()
    for source, exists, target, written in zip(
        *(a.tolist() for a in jax.tree.leaves(pairs)), strict=True
    ):
        sentence = [w for w, e in zip(source, exists, strict=True) if e]
        assert exists == sorted(exists, reverse=True)
        assert [w for w, e in zip(target, written, strict=True) if e] == translate(
            sentence, lexicon
        )
        lengths.add(len(sentence))
    assert lengths == {3, 4, 5, 6, 7}
    assert pairs.target.max() < grammar.VOCAB_SIZE and pairs.source.max() < grammar.VOCAB_SIZE


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
    assert (data.mask.sum(axis=1) == lengths + 1).all()  # the letters and the end mark
    assert make_pairs(jax.random.key(1), 40, 6, 4, task).source_mask.all()


def test_lengths_are_not_drawn_with_the_key_of_letters():
    """Four lengths and four letters: of one key, lengths would be the first letters."""
    full, cut = (make_pairs(jax.random.key(1), 40, 6, 4, "copy", min_len=least) for least in (6, 3))
    letters, lengths = full.source.ravel()[:40] - NUM_MARKS, cut.source_mask.sum(axis=1)
    assert (letters == lengths - 3).mean() < 0.6


SIZES = {"num_examples": 2, "seq_len": 6, "num_letters": 4, "task": "copy"}


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
