"""Heads at initialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.theorems import initial
from tests.support.closeness import assert_close

pytestmark = pytest.mark.usefixtures("x64")


def test_heads_differ_where_attention_is_not_uniform():
    """With uniform attention H heads are one head of the same values: nothing can depend on H."""
    key = jax.random.key(1)
    sizes, keys = {"depth": 2, "d": 16}, jax.random.split(key, 3)

    def pass_all(heads):
        return jax.jit(jax.vmap(lambda one: initial.pass_heads(one, heads, **sizes)))(keys)

    apart = {h: np.mean(1 - np.asarray(pass_all(h))[:, -1]) for h in (1, 4)}
    compare = functools.partial(initial.compare_heads, few=1, many=4, networks=3, **sizes)
    measured = jax.jit(compare)(key)
    assert measured == pytest.approx(np.log(apart[4] / apart[1])) and abs(measured) > 1e-3


@pytest.mark.parametrize("is_uniform", [False, True])
def test_cosines_of_post_norm_attention_are_those_of_numpy(is_uniform):
    """Two heads: every layer adds the branch to the normed state and norms the sum again."""
    key, heads, depth, n, d = jax.random.key(6), 2, 3, 4, 6
    sizes = {"depth": depth, "n": n, "d": d}
    measured = initial.pass_heads(key, heads, **sizes, uniform=is_uniform)
    config = rc.san_skip(depth, heads, d, norm_placement="post", norm="rms")
    key_p, key_x = jax.random.split(key)
    attention = rc.init(key_p, config).layers.attention
    q, k, v, o = (np.asarray(getattr(attention, f"w_{name}")) for name in "qkvo")
    x, expected = np.asarray(jax.random.normal(key_x, (n, d))), []
    for layer in range(depth + 1):
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        expected.append(np.mean([unit[i] @ unit[j] for i in range(n) for j in range(i)]))
        if layer == depth:
            break
        branch = 0
        for h in range(heads):
            scores = x @ q[layer, h] @ (x @ k[layer, h]).T / np.sqrt(q.shape[-1])
            weights = np.exp(0 * scores if is_uniform else scores)
            weights = weights / weights.sum(axis=1, keepdims=True)
            branch = branch + weights @ x @ v[layer, h] @ o[layer, h]
        x = x + branch
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_eps)
    assert_close(measured, expected, rtol=1e-5)


def test_curves_of_heads_are_logarithms_of_means_over_draws(monkeypatch):
    calls = []

    def fake_pass(key, heads, *, n, uniform):
        calls.append((heads, n, uniform))
        start = jax.random.uniform(key) / 4 + heads / 64
        return jnp.array([start, start + 0.25, start + 0.5])

    monkeypatch.setattr(initial, "pass_heads", fake_pass)
    *curves, last = initial.head_curves(2, n=5, depth=2, draws=3)
    keys = jax.random.split(jax.random.key(2), 3)
    starts = [float(jax.random.uniform(key)) / 4 for key in keys]
    apart = {h: [1 - np.mean(starts) - h / 64 - i / 4 for i in range(3)] for h in (1, 4, 16)}
    cosine = np.mean(starts) + np.mean([1, 4, 16]) / 64
    law = [1 - cosine]
    for _ in range(2):  # 1 − ρ' = (1 − ρ)/(1 + ρ + (1 − ρ)/n)
        law.append(law[-1] / (2 - law[-1] + law[-1] / 5))
    for curve, (heads, values) in zip(curves, apart.items(), strict=True):
        assert (curve.name, curve.relation, curve.panel) == (f"H {heads}, uniform", "none", 0)
        assert_close(curve.measured, np.log(values), rtol=1e-6)
        assert_close(curve.predicted, np.log(law), rtol=1e-5)
        assert [*curve.x] == [0, 1, 2]
    assert_close(last.measured, [np.log(values[-1]) for values in apart.values()], rtol=1e-6)
    assert_close(last.predicted, np.log(law[-1]), rtol=1e-5)
    assert (last.x, last.relation, last.tolerance, last.panel) == ((1, 4, 16), "=", 0.15, 1)
    assert last.name == "after 12 layers, uniform"
    assert set(calls) == {(1, 5, True), (4, 5, True), (16, 5, True)}


def test_shares_of_differences_by_depth_are_those_of_numpy(monkeypatch):
    """Attention of equal weights and one head: every state gets the mean of all."""
    seed, n, d, draws = 3, 4, 6, 2
    small, large = initial.gain_curves(seed, n=n, d=d, draws=draws)
    keys = jax.random.split(jax.random.key(seed), draws)

    @jax.jit
    @jax.vmap
    def draw(key):
        key_p, key_x = jax.random.split(key)
        matrices = {}
        for depth in (4, 16, 64):
            attention = rc.init(key_p, rc.san_skip(depth, 1, d)).layers.attention
            matrices[depth] = attention.w_v, attention.w_o
        return jax.random.normal(key_x, (n, d)), matrices

    tokens, matrices = jax.device_get(draw(keys))
    for curve, power in ((small, 0.5), (large, 0.0)):
        for place, depth in enumerate((4, 16, 64)):
            spread, size = [], []
            for x, w_v, w_o in zip(tokens, *matrices[depth], strict=True):
                for v, o in zip(w_v, w_o, strict=True):
                    x = x + depth**-power * x.mean(axis=0) @ v[0] @ o[0]
                spread.append(np.sum((x - x.mean(axis=0)) ** 2, axis=1).mean())
                size.append(np.sum(x**2, axis=1).mean())
            share = np.mean(spread) / np.mean(size)
            assert_close(curve.measured[place], np.log10(share), rtol=1e-4, atol=1e-5)
            growth = (1 + 1 / depth if power else 2.0) ** depth
            law = np.log10((n - 1) / (n - 1 + growth))
            assert_close(curve.predicted[place], law, rtol=1e-9)
    assert (small.name, large.name) == ("gain 1/√L", "gain 1")
    assert small.x == large.x == (4, 16, 64) and small.tolerance == 0.3
    assert small.panel == large.panel == 0 and small.relation == large.relation == "="


@pytest.mark.parametrize("is_random", [True, False])
def test_a_pair_on_the_sphere_is_that_of_numpy(is_random):
    key, time, d, depth = jax.random.key(8), 1.5, 3, 5
    measured = initial.pass_pair(key, time, d=d, depth=depth, random=is_random)
    key_v, key_x = jax.random.split(key)
    x = np.asarray(jax.random.normal(key_x, (2, d)))
    values = np.asarray(jax.random.normal(key_v, (depth, 1, d, d)))[:, 0] / np.sqrt(d)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    for value in values:
        weights = np.exp(x @ x.T)
        branch = weights @ x / weights.sum(axis=1, keepdims=True)
        gain = np.sqrt(time / depth) if is_random else time / depth
        x = x + gain * branch @ (value if is_random else np.eye(d))
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert_close(measured, x[0] @ x[1], rtol=1e-6)


def test_shares_of_opposite_pairs_are_by_time_and_kind(monkeypatch):
    def fake_pair(key, time, *, random=True, d=2):
        return jax.random.uniform(key, minval=-1) + time / (20 if random else 5) * d / 2

    monkeypatch.setattr(initial, "pass_pair", fake_pair)
    keys = jax.random.split(jax.random.key(4), 256)
    draws = np.array([float(jax.random.uniform(key, minval=-1)) for key in keys])
    times = np.array([0, 1, 2, 4, 8, 16])
    random, identity, longest = initial.noise_curves(4)
    shares = {scale: [np.mean(draws + t / scale < 0) for t in times] for scale in (20, 5)}
    assert_close(random.measured, shares[20])
    assert_close(identity.measured, shares[5])
    assert (random.name, identity.name) == ("random values", "V = I")
    assert [*random.x] == [*identity.x] == [*times] and random.relation == "none"
    assert_close(longest.measured, shares[20][-1:])
    assert longest.name == "longest time, above 0"
    fields = longest.x.tolist(), longest.predicted, longest.relation, longest.ordering
    assert fields == ([16], 0.1, "≥", True)
    wide = initial.opposite_share(jax.random.key(4), 2.0, pairs=256, d=4)
    assert_close(wide, np.mean(draws + 0.2 < 0))
