"""Embeddings step by step in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import each_is_refused
from scipy import special

import rank_collapse as rc
from rank_collapse.network.embedding import init_embedding, sinusoidal_positions


def norm(x, p):
    x, p = np.asarray(x), jax.tree.map(np.asarray, p)
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-12)
    return y * p.gain + p.bias


def test_tokens_positions_segments_and_projection(x64):
    ids, segments = jnp.array([4, 1, 4]), jnp.array([0, 1, 1])
    for projection in ("before_norm", "after_norm"):
        config = rc.EmbeddingConfig(
            vocab_size=6,
            d_embed=5,
            positions="learned",
            num_positions=4,
            num_segments=2,
            projection=projection,
            scale=2.0,
        )
        p = init_embedding(jax.random.key(0), config, 7, std=1.0)
        x = p.tokens[ids] * 2.0 + p.positions[:3] + p.segments[segments]
        if projection == "before_norm":
            expected = norm(x @ p.w_project + p.b_project[None], p.norm)
        else:
            expected = norm(x, p.norm) @ p.w_project + p.b_project[None]
        np.testing.assert_allclose(rc.embed(p, ids, config, segments=segments), expected, rtol=1e-9)
        moved = rc.embed(p, ids, config, positions=jnp.array([2, 1, 0]), segments=segments)
        assert np.abs(moved - expected)[0].max() > 1e-2


def test_vectors_with_a_hidden_layer_and_class_token(x64):
    config = rc.EmbeddingConfig(d_input=3, d_embed=8, hidden_layer=True, class_token=True)
    p = init_embedding(jax.random.key(0), config, 8, std=1.0)
    x = jax.random.normal(jax.random.key(1), (4, 3))
    z = np.asarray(x @ p.w_in)
    z = (z * special.ndtr(z)) @ p.w_hidden
    expected = norm(np.concatenate([p.class_token[None], z]), p.norm)
    np.testing.assert_allclose(rc.embed(p, x, config), expected, rtol=1e-9)


def test_sinusoidal_positions_rotate_with_distance(x64):
    table = sinusoidal_positions(jnp.arange(9.0), 6)
    np.testing.assert_allclose(table[0], [0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(table[2] @ table[5], table[3] @ table[6], rtol=1e-12)


def test_apply_embeds_token_ids():
    config = rc.transformer(
        2, 2, 8, embedding=rc.EmbeddingConfig(vocab_size=6, d_embed=8, positions="sinusoidal")
    )
    params = rc.init(jax.random.key(0), config)
    ids = jnp.array([1, 5, 2])
    x = rc.embed(params.embedding, ids, config.embedding)
    direct = rc.apply(params, x, config).output
    np.testing.assert_allclose(rc.apply(params, ids, config).output, direct, rtol=1e-6)


def test_errors_name_the_value():
    each_is_refused(
        (lambda: rc.EmbeddingConfig(vocab_size=3, d_input=2), "vocab_size=3 and d_input=2"),
        (lambda: rc.EmbeddingConfig(vocab_size=3, projection="twice"), "projection='twice'"),
    )
    config = rc.EmbeddingConfig(vocab_size=3, d_embed=4, positions="learned", num_positions=2)
    with pytest.raises(ValueError, match="d_embed=4 is not d_model=5"):
        init_embedding(jax.random.key(0), config, 5)
    p = init_embedding(jax.random.key(0), config, 4)
    each_is_refused(
        (
            lambda: rc.embed(p, jnp.array([0, 1, 2]), config),
            "3 tokens are more than num_positions=2",
        ),
        (lambda: rc.embed(p, jnp.zeros((2, 4)), config), r"shape \(2, 4\)"),
    )
