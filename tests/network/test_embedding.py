"""Embeddings of tokens, vectors, images and frames: against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import rank_collapse as rc
from rank_collapse.network.embedding import init_embedding, sinusoidal_positions
from tests.oracles import draws
from tests.support.closeness import assert_close


def norm(x, p, eps=1e-12):
    x, p = np.asarray(x), jax.tree.map(np.asarray, p)
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
    return y * p.gain + p.bias


@pytest.mark.full
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
        assert_close(rc.network.embed(p, ids, config, segments=segments), expected, rtol=1e-9)
        moved = rc.network.embed(p, ids, config, positions=jnp.array([2, 1, 0]), segments=segments)
        assert np.abs(moved - expected)[0].max() > 1e-2


def test_sines_of_positions_are_added_as_vaswani_et_al_have_them(x64):
    """Sines, then cosines, of p/10000^(2i/d)."""
    config = rc.EmbeddingConfig(vocab_size=6, d_embed=4, positions="sinusoidal", norm=False)
    params, ids, positions = init_embedding(jax.random.key(0), config, 4), [4, 1, 4], [3, 0, 7]
    for used, index in ((None, range(3)), (jnp.array(positions), positions)):
        angles = np.outer(index, [1, 0.01])
        expected = params.tokens[jnp.array(ids)] + np.hstack([np.sin(angles), np.cos(angles)])
        states = rc.network.embed(params, jnp.array(ids), config, positions=used)
        assert_close(states, expected, rtol=1e-9)
    angles = np.outer([0, 2, 7], 10000.0 ** -(np.array([0, 2, 4]) / 5))
    odd = sinusoidal_positions(jnp.array([0.0, 2, 7]), 5)  # a sine more than cosines
    assert_close(odd, np.hstack([np.sin(angles), np.cos(angles[:, :2])]), rtol=1e-9)


def test_vectors_with_a_hidden_layer_and_class_token(x64):
    config = rc.EmbeddingConfig(
        d_input=3, d_embed=8, hidden_layer=True, class_token=True, norm_eps=0.1
    )
    p = init_embedding(jax.random.key(0), config, 8, std=1.0)
    x = draws.normal(4, 3)
    z = np.asarray(x @ p.w_in)
    z = (z * special.ndtr(z)) @ p.w_hidden
    expected = norm(np.concatenate([p.class_token[None], z]), p.norm, 0.1)
    assert_close(rc.network.embed(p, x, config), expected, rtol=1e-9)


def draw_embedding(config, width):
    shapes = jax.eval_shape(lambda: init_embedding(jax.random.key(0), config, width))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: rng.normal(size=a.shape), shapes)


@pytest.mark.parametrize("place_registers", [False, True])
@pytest.mark.parametrize("class_token", [False, True])
def test_registers_are_put_after_the_class_token_and_counted_where_they_are_placed(
    class_token, place_registers, x64
):
    """Scales multiply what is looked up alone, and every token is of segment 0 by default."""
    config = rc.EmbeddingConfig(vocab_size=6, d_embed=4, norm=False, scale=0.5)
    config = config.replace(positions="learned", num_positions=6, num_segments=3, num_registers=2)
    config = config.replace(class_token=class_token, place_registers=place_registers)
    p, ids = draw_embedding(config, 4), np.array([4, 1, 4])
    words, first = 0.5 * p.tokens[ids], [p.class_token][:class_token]
    for positions, segments in ((None, None), (True, True)):
        rows = np.concatenate([np.stack([*first, *p.registers]), words])
        count = len(rows) if place_registers else len(rows) - 2
        index = np.arange(count) if positions is None else np.arange(count)[::-1]
        kinds = np.zeros(len(rows), int) if segments is None else np.arange(len(rows)) % 3
        place = p.positions[index]
        if not place_registers:  # they have no position
            place = np.insert(place, [int(class_token)] * 2, 0, axis=0)
        states = rc.network.embed(
            p,
            jnp.asarray(ids),
            config,
            positions=positions and jnp.asarray(index),
            segments=segments and jnp.asarray(kinds),
        )
        assert_close(states, rows + place + p.segments[kinds], rtol=1e-12)


def test_frames_pass_two_convolutions_over_three_of_which_the_second_takes_every_other(x64):
    """gelu(Σ_j x_{s t + j − 1} w_j + b), zeros beyond the ends; of five frames three are left."""
    config = rc.EmbeddingConfig(d_input=2, d_embed=3, convolutions=True, norm=False)
    p, x = draw_embedding(config, 3), np.asarray(draws.normal(5, 2))
    for w, b, stride in ((p.w_in, p.b_in, 1), (p.w_hidden, p.b_hidden, 2)):
        out = []
        for t in range(0, len(x), stride):
            z = b.copy()
            for j in range(3):
                if 0 <= t + j - 1 < len(x):
                    z += x[t + j - 1] @ w[j]
            out.append(z * special.ndtr(z))
        x = np.array(out)
    assert x.shape == (3, 3)
    frames = jnp.asarray(draws.normal(5, 2))
    assert_close(rc.network.embed(p, frames, config), x, rtol=1e-10)


def test_what_an_embedding_has_unless_it_is_given():
    config = rc.EmbeddingConfig(vocab_size=3)
    assert (config.d_embed, config.norm, config.norm_eps, config.scale) == (64, True, 1e-12, 1)
    assert (config.positions, config.projection, config.num_segments) == ("none", "none", 0)
    switches = config.class_token, config.num_registers, config.place_registers, config.hidden_layer
    assert not any((*switches, config.convolutions, config.d_input, config.num_positions))


def test_no_two_tables_of_an_embedding_are_drawn_alike():
    config = rc.EmbeddingConfig(
        d_input=2, d_embed=8, positions="learned", num_positions=2, num_segments=2
    )
    config = config.replace(class_token=True, num_registers=2, hidden_layer=True)
    params = init_embedding(jax.random.key(0), config, 8)
    tables = [params.w_in, params.w_hidden[:2], params.positions, params.segments, params.registers]
    tables.append(jnp.broadcast_to(params.class_token, (2, 8)))
    for one, other in itertools.combinations(tables, 2):
        assert np.all(np.any(np.asarray(one) != np.asarray(other), axis=1))
