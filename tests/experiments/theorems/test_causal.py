"""Causal attention on the sphere: parked tokens and the others."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import rank_collapse as rc
from experiments.theorems import causal
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_parked_tokens_are_apart_and_the_others_near():
    angles, distance = np.random.default_rng(0).uniform(0, 2 * np.pi, 300), 0.5
    centres = causal.park(angles, distance)
    gaps = np.abs(angles[:, None] - angles[centres])
    gaps = np.minimum(gaps, 2 * np.pi - gaps)
    assert (gaps.min(axis=1) <= distance).all()
    np.fill_diagonal(between := gaps[centres], np.inf)
    assert between.min() > distance and centres[0] == 0


@pytest.mark.parametrize("turn", [0.0, -0.1, 1.0, 4.0, -7.0])
def test_groups_on_the_circle_are_counted_wherever_its_angles_begin(turn):
    """Rotated, by whole turns too; a group across the cut is one."""
    groups = np.concatenate([np.linspace(0, 0.3, 4), 2 + np.linspace(0, 0.2, 3), [4.5]])
    whole_turns = 2 * np.pi * np.arange(len(groups))
    for angles in (groups + turn, groups + turn + whole_turns):
        assert causal.count_clusters(angles, 0.5) == 3
        assert causal.count_clusters(angles, 0.05) == 8
    assert causal.count_clusters(groups[:4] + turn, 0.5) == 1


def test_the_repeated_token_counts_with_its_number():
    """Against NumPy: of k equal keys one has k times the weight."""
    key, depth = jax.random.key(0), 2
    (distance,) = causal.repeated_distances(key, (3,), depth=depth, d=8)
    config = causal.make_pre_norm(depth, 8, 4)
    key_e, key_p = jax.random.split(key)
    zero, one = np.asarray(jax.random.normal(key_e, (2, 8)))
    attention = rc.init(key_p, config).layers.attention

    def last_state(count):
        x = np.stack([*[one] * count, zero])
        for layer in range(depth):
            normed, branch = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_eps), 0
            for h in range(4):
                q, k, v, o = (np.asarray(getattr(attention, f"w_{n}"))[layer, h] for n in "qkvo")
                weights = np.exp(normed @ q @ (normed @ k).T / np.sqrt(k.shape[1]))
                weights = weights * np.tri(count + 1)
                weights = weights / weights.sum(axis=1, keepdims=True)
                branch = branch + weights @ normed @ v @ o
            x = x + branch
        return x[-1]

    assert_close(distance, np.linalg.norm(last_state(3) - last_state(4)), rtol=1e-5)


@pytest.mark.full
def test_tokens_meet_at_the_first_only_under_a_causal_mask():
    curves = {curve.name: curve for curve in causal.first_token_curves(2)}
    assert curves["causal, worst of the draws"].measured[-1] > 1 - 1e-6
    assert curves["no mask, worst of the draws"].measured[-1] < 0.9


@pytest.mark.full
def test_repeated_tokens_come_together_almost_by_their_law():
    (slopes,) = (c for c in causal.repeated_curves(2) if c.name == "power of k from 32 to 256")
    assert (np.abs(np.asarray(slopes.measured) + 1.9) < 0.15).all()


@pytest.mark.full
def test_the_exact_jacobian_exceeds_path_products_more_at_larger_weights():
    """At a fourth of 1/√fan-in the scores pass almost nothing."""
    fixed, exact = (np.asarray(curve.measured) for curve in causal.jacobian_curves(2))
    assert (fixed <= 1 + 1e-9).all()
    assert_close(exact[0], fixed[0], rtol=1e-3)
    assert exact[2] > 2 and exact[3] > 100


@pytest.mark.full
def test_the_first_token_takes_the_weight_as_the_bound_says_and_skips_keep_the_others():
    off, shared, _ = causal.first_mass_curves(2)
    assert off.holds().all() and off.predicted[-1] < 0.5 and off.measured[-1] < 0.01
    assert off.measured[0] == pytest.approx(off.predicted[0])  # of the last token, in this draw
    assert 0.92 < shared.measured[-1] < 0.96


def pass_sphere(x, scores, gain, times, *, is_causal):
    """Passes tokens along the sphere in NumPy; states [l, n, d] at some layers, ascending."""
    allowed, states = np.tri(len(x)) if is_causal else np.ones((len(x), len(x))), []
    for layer in range(times[-1] + 1):
        if layer in times:
            states.append(x)
        weights = np.exp(x @ scores @ x.T) * allowed
        x = x + gain * weights @ x / weights.sum(axis=1, keepdims=True)
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return np.array(states)


def compute_angles(x, y):
    return np.arccos(np.clip(x @ y.T, -1, 1))


def list_parked(angles, distance):
    """Lists the centres one by one, by the angle on the shorter side."""
    centres = []
    for i, angle in enumerate(angles):
        gaps = [np.abs(np.angle(np.exp(1j * (angle - angles[c])))) for c in centres]
        centres += [i] if min(gaps, default=np.inf) > distance else []
    return centres


def test_curves_of_parking_are_means_over_all_draws():
    """The same three draws, token by token in NumPy; with one draw there are numbers, too."""
    seed, n, beta, draws = 4, 7, 36.0, 3
    distance = 4 / np.sqrt(beta)
    curves = {c.name: c for c in causal.parking_curves(seed, n=n, beta=beta, draws=draws)}
    near, moved, groups = [], [], []
    for draw in range(draws):
        key = jax.random.fold_in(jax.random.key(seed), draw)
        start = np.asarray(jax.random.uniform(key, (n,), maxval=2 * np.pi))
        x, centres = np.stack([np.cos(start), np.sin(start)], axis=1), list_parked(start, distance)
        states = pass_sphere(x, beta * np.eye(2), 0.05, range(0, 101, 20), is_causal=True)
        gaps = np.array([compute_angles(state, x[centres]).min(axis=1) for state in states])
        near.append((gaps < distance).mean(axis=1))
        moved.append([np.diag(compute_angles(s, x))[centres].mean() / distance for s in states])
        angles = np.sort(np.arctan2(states[..., 1], states[..., 0]), axis=1)
        arcs = np.diff(angles, axis=1, append=angles[:, :1] + 2 * np.pi)
        groups.append((arcs > distance / 4).sum(axis=1))
    times = [0, 1, 2, 3, 4, 5]
    expected = {"tokens within δ of a centre": near, "centres": moved, "groups of tokens": groups}
    for panel, (name, values) in zip((2, 3, 1), expected.items(), strict=True):
        curve, mean = curves[name], np.mean(values, axis=0)
        skipped = len(mean) - len(curve.measured)
        assert_close(curve.measured, mean[skipped:], rtol=1e-6, atol=1e-6)
        assert_close(curve.x, times[skipped:])
        assert (curve.relation, curve.panel, skipped) == ("none", panel, panel == 1)
    tokens = [25, 50, 100, 200, 1000, 5000]
    uniform = [
        [np.random.default_rng((seed, i)).uniform(0, 2 * np.pi, count) for i in range(draws)]
        for count in tokens
    ]
    counts = np.array([[len(list_parked(a, distance)) for a in rows] for rows in uniform[:4]])
    fewer, most = curves["fewer tokens"], curves["5000 tokens"]
    assert_close(fewer.measured[:4], counts.mean(axis=1))
    assert fewer.x.tolist() == tokens[:-1] and fewer.relation == "none" and most.x == [5000]
    last = causal.count_centres(seed, 5000, distance, draws)
    assert_close(most.measured, [np.mean(last)])
    assert_close(most.predicted, 0.7475979202534114 * 2 * np.pi / distance)
    assert_close(most.tolerance, 3 * np.std(last) / np.sqrt(draws) / most.predicted)
    assert (most.relation, most.panel) == ("=", 0)
    (one,) = (c for c in causal.parking_curves(seed, n=n, draws=1) if c.name == "centres")
    assert np.isfinite(one.measured).all()


def test_curves_of_the_first_token_are_those_of_the_worst_draw():
    seed, n, d = 1, 4, 3
    curves = causal.first_token_curves(seed, n=n, d=d, draws=2)
    times, least = np.array([0, 5, 10, 15, 20, 30, 40]), {True: [], False: []}
    for draw in range(2):
        key_m, key_x = jax.random.split(jax.random.fold_in(jax.random.key(seed), draw))
        x, scores = np.asarray(jax.random.normal(key_x, (n, d))), jax.random.normal(key_m, (d, d))
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        for is_causal in (True, False):
            states = pass_sphere(x, np.asarray(scores), 0.05, times * 20, is_causal=is_causal)
            least[is_causal].append((states @ x[0]).min(axis=1))
    worst = {side: np.min(values, axis=0) for side, values in least.items()}
    expected = {
        "causal, worst of the draws": (times, worst[True], "none"),
        "the same, last time": ([40], worst[True][-1:], "="),
        "no mask, worst of the draws": (times, worst[False], "none"),
    }
    for curve, (name, (x, values, relation)) in zip(curves, expected.items(), strict=True):
        assert (curve.name, curve.relation, [*curve.x]) == (name, relation, [*x])
        assert_close(curve.measured, values, rtol=1e-6)
    assert curves[1].predicted == 1


def test_curves_of_repeated_tokens_are_of_the_distances_by_draw(monkeypatch):
    counts, keys = np.array(causal.COUNTS), []

    def fake_distances(key, numbers):
        assert numbers == causal.COUNTS
        scale = jax.random.uniform(key, (2,), minval=1, maxval=2)
        return scale[0] * jax.numpy.asarray(counts, float) ** (-1.5 - scale[1])

    monkeypatch.setattr(causal, "repeated_distances", fake_distances)
    keys = [jax.random.fold_in(jax.random.key(3), draw) for draw in range(2)]
    distances = np.array([fake_distances(key, causal.COUNTS) for key in keys])
    mean, near, quarter, power, slopes = causal.repeated_curves(3, draws=2)
    geometric = np.sqrt(distances[0] * distances[1])
    assert_close(mean.measured, geometric)
    assert_close(mean.predicted, geometric[-1] * (counts / 256.0) ** -2)
    for curve, predicted in ((near, 1), (quarter, 0.25)):
        assert_close(curve.measured, [geometric[i + 1] / geometric[i] for i in range(5)])
        assert curve.predicted == predicted and [*curve.x] == [*counts[1:]]
    steps = np.log2([row[1:] / row[:-1] for row in distances])
    assert_close(power.measured, steps.mean(axis=0))
    assert_close(slopes.measured, steps.mean(axis=1))  # straight lines: one power at all counts
    assert [*slopes.x] == [0, 1] and [*power.x] == [*counts[1:]] and [*mean.x] == [*counts]
    assert slopes.predicted == power.predicted == -2
    relations = [(c.relation, c.panel, c.ordering) for c in (mean, near, quarter, power, slopes)]
    assert relations == [
        ("none", 0, False),
        ("≤", 1, True),
        ("none", 1, False),
        ("none", 2, False),
        ("none", 3, False),
    ]
    assert near.tolerance == 0
    names = "mean of the draws, beside", "distance goes to 0", "k⁻²: one fourth"
    names += "from k/2 to k, mean of the draws", "power of k from 32 to 256"
    for curve, name in zip((mean, near, quarter, power, slopes), names, strict=True):
        assert curve.name.startswith(name)


def test_the_fitted_power_is_that_of_the_larger_counts(monkeypatch):
    """Two distances at small counts, which another law rules, do not enter it."""
    law = np.array([7.0, 1.0, *np.array(causal.COUNTS[2:], float) ** -1.25])
    monkeypatch.setattr(causal, "repeated_distances", lambda *_: jax.numpy.asarray(law))
    assert_close(causal.repeated_curves(0, draws=1)[-1].measured, [-1.25])


@pytest.mark.parametrize("freeze", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_largest_norm_over_its_bound_is_that_of_numpy(freeze):
    """Three layers of skip + causal attention; differences of the states after the first layer."""
    key, scale, n, d, depth = jax.random.key(5), 1.5, 3, 2, 3
    measured = causal.bound_ratio(key, scale, freeze=freeze, depth=depth, n=n, d=d)
    config = rc.san_skip(depth, 1, d, mask="causal")
    key_p, key_x = jax.random.split(key)
    attention = rc.init(key_p, config, scale).layers.attention
    q, k, v, o = (np.asarray(getattr(attention, f"w_{name}"))[:, 0] for name in "qkvo")
    x = np.asarray(jax.random.normal(key_x, (n, d)))

    def weigh(x, layer):
        weights = np.exp(x @ q[layer] @ (x @ k[layer]).T / np.sqrt(d)) * np.tri(n)
        return weights / weights.sum(axis=1, keepdims=True)

    def step(x, layer, weights=None):
        return x + (weigh(x, layer) if weights is None else weights) @ x @ v[layer] @ o[layer]

    first = step(x, 0)
    weights = [weigh(first, 1), weigh(step(first, 1), 2)]

    def finish(flat):
        state = flat.reshape(n, d)
        for layer in (1, 2):
            state = step(state, layer, weights[layer - 1] if freeze else None)
        return state

    jacobian, bound = np.zeros((n, n, d, d)), np.eye(n)
    for j in range(n * d):
        shift = 1e-6 * np.eye(n * d)[j]
        column = (finish(first.ravel() + shift) - finish(first.ravel() - shift)) / 2e-6
        jacobian[:, j // d, :, j % d] = column
    for layer in (1, 2):
        size = np.linalg.norm(v[layer] @ o[layer], ord=2)
        bound = (np.eye(n) + size * weights[layer - 1]) @ bound
    ratios = [
        np.linalg.norm(jacobian[i, j], ord=2) / bound[i, j] for i in range(n) for j in range(i + 1)
    ]
    assert_close(measured, max(ratios), rtol=1e-4)


def test_weights_of_paths_are_constants_where_they_are_to_be(monkeypatch):
    asked = []

    def transport(fn, x, direction, **options):
        asked.append(options)
        return SimpleNamespace(by_position=jax.numpy.stack([direction, 2 * direction]))

    monkeypatch.setattr(causal.rc.paths, "transport", transport)
    key, sizes = jax.random.key(5), {"depth": 3, "n": 3, "d": 2}
    measured = [causal.bound_ratio(key, 1.5, freeze=freeze, **sizes) for freeze in (True, False)]
    common = {"layer": 0, "branches": "attention", "first_position": 0}
    assert asked == [common | {"freeze": True}, common | {"freeze": False}]
    assert measured[0] == measured[1] and measured[0] < 3  # of three times the identity


def test_curves_of_the_bound_are_by_scale_and_kind(monkeypatch):
    monkeypatch.setattr(causal, "bound_ratio", lambda key, scale, freeze: scale * (3 - 2 * freeze))
    fixed, exact = causal.jacobian_curves(0)
    assert_close(fixed.measured, causal.SCALES)
    assert_close(exact.measured, 3 * np.array(causal.SCALES))
    assert [*fixed.x] == [*exact.x] == [*causal.SCALES]
    assert (fixed.name, exact.name) == ("weights of attention fixed", "exact Jacobian")
    assert (fixed.relation, fixed.predicted, fixed.beyond) == ("≤", 1, False)
    assert (exact.relation, exact.predicted, exact.beyond) == ("≤", 1, True)


def test_products_of_causal_attention_are_those_of_numpy():
    seed, n, depth = 2, 5, 64
    off, shared, second = causal.first_mass_curves(seed, n=n, depth=depth)
    x = np.asarray(jax.random.normal(jax.random.key(seed), (n, 8)))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    product, mixed, uniform, least = np.eye(n), np.eye(n), np.eye(n), 1.0
    by_depth = []
    for _ in range(depth):
        weights = np.exp(x @ x.T) * np.tri(n)
        weights /= weights.sum(axis=1, keepdims=True)
        least = min(least, weights[:, 0].min())
        x, product = weights @ x, weights @ product
        mixed = ((1 - 1 / depth) * np.eye(n) + weights / depth) @ mixed
        flat = np.tri(n) / np.arange(1, n + 1)[:, None]
        uniform = (np.eye(n) + flat) / 2 @ uniform
        by_depth.append((1 - product[-1, 0], 1 - mixed[-1, 0], uniform[1, 1]))
    depths = np.array([1, 2, 4, 8, 16, 32, 64])
    columns = np.array(by_depth)[depths - 1].T
    for curve, column, relation in zip(
        (off, shared, second), columns, ("≤", "none", "="), strict=True
    ):
        assert_close(curve.measured, column, rtol=1e-6, atol=1e-12)
        assert [*curve.x] == [*depths] and curve.relation == relation
    assert_close(off.predicted, [(1 - least) ** k for k in depths], rtol=1e-6)
    assert_close(second.predicted, 0.75**depths)
    assert (off.panel, shared.panel, second.panel) == (0, 0, 1)
    names = "off the first token, no skips", "share 1/L of attention", "share ½ of attention"
    assert [c.name.endswith(name) for c, name in zip((off, shared, second), names, strict=True)]
