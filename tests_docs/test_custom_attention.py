"""Attention that users write themselves (docs/variants.md): path sums give back the output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc

CONFIG = rc.san_skip(depth=3, num_heads=2, d_model=16, mask="causal", norm_placement="pre")
PARAMS = rc.init(jax.random.key(0), CONFIG)
X = jax.random.normal(jax.random.key(1), (6, 16))


def linear_attention(q, k, v, context):
    """Linear attention (Katharopoulos et al. 2020)."""
    features = [jax.nn.elu(a) + 1 for a in (q, k)]
    m = jnp.where(context.mask, features[0] @ features[1].swapaxes(1, 2), 0)
    return m / m.sum(axis=-1, keepdims=True), None


def selective_attention(q, k, v, context):
    """A selective state space (Gu and Dao 2023): M_ij = (C_i·B_j) a_{j+1} ⋯ a_i."""
    log_decay = jax.nn.log_sigmoid(k.sum(axis=-1))  # [h, n]
    decay, total = jnp.exp(log_decay), jnp.cumsum(log_decay, axis=1)
    m = jnp.where(context.mask, q @ k.swapaxes(1, 2), 0)
    m = m * jnp.where(context.mask, jnp.exp(total[:, :, None] - total[:, None, :]), 0)

    def step(state, token):
        a, b, c, value = token
        state = a[:, None, None] * state + b[:, :, None] * value[:, None, :]
        return state, jnp.einsum("hk,hkv->hv", c, state)

    tokens = (decay.T, *(a.swapaxes(0, 1) for a in (k, q, v)))
    start = jnp.zeros((*k.shape[::2], v.shape[-1]))
    return m, jax.lax.scan(step, start, tokens)[1].swapaxes(0, 1)


def gated_attention(q, k, v, context):
    """A gate, computed from the queries, multiplies the output of a softmax head."""
    scores = jnp.where(context.mask, q @ k.swapaxes(1, 2) / jnp.sqrt(q.shape[-1]), -jnp.inf)
    p = jax.nn.softmax(scores)
    return p, jax.nn.sigmoid(q.sum(axis=-1, keepdims=True)) * (p @ v)


@pytest.mark.parametrize("mix", [linear_attention, selective_attention, gated_attention])
def test_all_paths_sum_to_the_output(mix):
    config = CONFIG.replace(mix=mix)
    output = rc.apply(PARAMS, X, config).output
    total = rc.path_contributions(PARAMS, X, config).total
    np.testing.assert_allclose(total, output, rtol=1e-4, atol=1e-5)


def test_the_two_gelus_differ_by_what_the_page_says():
    z = jnp.linspace(-4, 4, 801)
    gap = jnp.abs(jax.nn.gelu(z) - jax.nn.gelu(z, approximate=False)).max()
    assert 4e-4 < gap < 5e-4
