"""The scalars for training loops: closed forms, the full measures, and every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from tests.support.closeness import near
from tests.support.refusals import is_refused, parametrize_refusals

N, D, H = 6, 10, 3


def draw_normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_weights(*leading, seed=1):
    return np.asarray(jax.nn.softmax(2 * draw_normal(*leading, H, N, N, seed=seed), axis=-1))


def test_agrees_with_the_measures_of_the_table():
    x, p = draw_normal(N, D), draw_weights()
    scalars = rc.monitor(x, p)
    assert scalars.pop("spiked") == 0
    entropies = rc.attention_entropy(p)
    assert scalars.pop("attention_entropy_least") == entropies.min()
    assert scalars.pop("attention_entropy_largest") == entropies.max()
    for name, value in scalars.items():
        array = x if rc.MEASURES[name].needs == "tokens" else p
        want = np.mean(rc.MEASURES[name](array))
        assert float(value) == pytest.approx(float(want), rel=1e-5), name
    assert scalars["sink_rate"] < rc.monitor(x, p, sink=1e-3)["sink_rate"] == 1


def test_the_bound_of_the_stable_rank_is_that_of_twenty_power_steps():
    """It is that of float64 by hand, and the true rank where σ_2 is far below σ_1."""
    x = draw_normal(N, D)
    v = np.random.default_rng(0).standard_normal(N)
    gram = x.astype(np.float64) @ x.T.astype(np.float64)
    for _ in range(20):
        v = gram @ v / np.linalg.norm(gram @ v)
    bound = float(rc.monitor(x)["stable_rank_bound"])
    assert bound == pytest.approx(np.trace(gram) / (v @ gram @ v), rel=1e-5)
    assert bound > float(rc.stable_rank(x))  # σ_1 is approached from below
    gap = x + 3 * draw_normal(1, D, seed=4)
    assert np.divide(*np.linalg.svd(gap, compute_uv=False)[:2]) > 2  # 4^-20 is left of the second
    bound = float(rc.monitor(gap)["stable_rank_bound"])
    assert bound == pytest.approx(float(rc.stable_rank(gap)), 1e-5)
    assert float(rc.measures.stable_rank_bound(np.zeros((N, D)))) == 0


def test_a_mask_is_as_if_tokens_were_not_there():
    keep = np.array([0, 1, 1, 0, 1, 1], bool)
    x, p = draw_normal(N, D), draw_weights() * keep
    p = p / p.sum(-1, keepdims=True)
    x[~keep] = 1e9
    masked = rc.monitor(x, p, mask=keep)
    removed = rc.monitor(x[keep], p[:, keep][:, :, keep])
    near(masked, removed, rtol=1e-4)


def test_the_first_key_is_the_first_that_exists_even_where_padding_is_attended_to():
    keep, p = np.arange(N) > 1, np.full((H, N, N), 0.1)
    p[:2, :, 2] = p[2, :, 0] = 0.5  # a sink at the first token in two heads, at padding in one
    scalars = rc.monitor(draw_normal(N, D), p, mask=keep)
    assert float(scalars["sink_rate"]) == pytest.approx(2 / 3)
    assert float(rc.monitor(draw_normal(N, D), p)["sink_rate"]) == pytest.approx(1 / 3)


@pytest.mark.full
def test_batches_are_means_of_examples_under_any_transformation():
    x, p = draw_normal(2, 4, N, D), draw_weights(2, 4)
    mask = np.arange(N) < np.array([3, 6, 5, 4, 6, 2, 6, 6]).reshape(2, 4, 1)
    scalars = rc.monitor(x, p, mask=mask)
    singles = [rc.monitor(x[i, j], p[i, j], mask=mask[i, j]) for i in range(2) for j in range(4)]
    by_example = jax.vmap(lambda x, p, m: rc.monitor(x, p, mask=m))(x[0], p[0], mask[0])

    @jax.jit
    def scan_layers(x):
        body = jax.checkpoint(lambda carry, x: (carry, rc.monitor(x)))
        return jax.lax.scan(body, 0.0, x)[1]

    layers = scan_layers(x[1])
    entropies = [
        [rc.attention_entropy(x, mask=m) for x, m in zip(*batch, strict=True)]
        for batch in zip(p, mask, strict=True)
    ]
    entropies = np.mean(entropies, axis=(0, 1))
    assert scalars.pop("attention_entropy_least") == pytest.approx(entropies.min(), rel=1e-5)
    assert scalars.pop("attention_entropy_largest") == pytest.approx(entropies.max(), rel=1e-5)
    pooled = np.where(mask[..., None], x, 0).sum(axis=-2) / mask.sum(axis=-1, keepdims=True)
    pooled = pooled.reshape(-1, D)
    for name in ("residual_ratio", "effective_rank"):
        want = getattr(rc, name)(pooled)
        np.testing.assert_allclose(scalars.pop(f"batch_{name}"), want, rtol=1e-5)
    for name, value in scalars.items():
        np.testing.assert_allclose(value, np.mean([s[name] for s in singles]), rtol=1e-5)
        np.testing.assert_allclose(by_example[name], [s[name] for s in singles[:4]], rtol=1e-5)
    np.testing.assert_allclose(layers["token_cosine"][2], rc.token_cosine(x[1, 2]), rtol=1e-5)


def test_low_precision_is_measured_in_float32_and_what_is_not_finite_is_nan():
    low = jnp.asarray(draw_normal(N, D), jnp.bfloat16)
    for name, value in rc.monitor(low).items():
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, rc.monitor(low.astype(jnp.float32))[name], rtol=1e-6)
    assert np.isnan(float(rc.monitor(low.at[0, 0].set(jnp.nan))["token_cosine"]))
    assert all(np.isfinite(float(v)) for v in rc.monitor(jnp.zeros((N, D))).values())


@parametrize_refusals(
    [
        ((np.ones(3),), {}, r"x of shape \(3,\)"),
        ((np.ones((1, 3)),), {}, "two tokens or more"),
        ((np.ones((2, 4, 3)),), {"mask": np.ones(3, bool)}, r"mask of shape \(3,\)"),
        ((np.ones((2, 4, 3)), np.ones((4, 4))), {}, r"attention of shape \(4, 4\)"),
        ((np.ones((4, 3)), np.ones((1, 5, 4))), {}, "has 5 queries, but x has 4 tokens"),
        ((np.ones((4, 3)),), {"sink": np.nan}, "sink=nan"),
    ]
)
def test_shapes_that_do_not_fit_are_refused(arguments, message):
    arrays, options = arguments
    is_refused(message, lambda: rc.monitor(*arrays, **options))
