"""Norms, activations, MLPs, embeddings and dropout: against numpy, and within statistics."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import rank_collapse as rc
from rank_collapse.network import dropout, layers
from rank_collapse.network.embedding import init_embedding
from rank_collapse.network.parameters import init_block
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals


def tokens(n=5, d=8, seed=3):
    return draws.normal(n, d, seed=seed) * 3.0 + 2.0


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_match_numpy(kind):
    x, gain, bias = np.asarray(tokens()), np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)
    centred = x - x.mean(axis=1, keepdims=True) if kind == "layer" else x
    size = np.sqrt((centred**2).mean(axis=1, keepdims=True) + 0.3)
    for shift in (bias, None):
        params = layers.NormParams(gain=jnp.asarray(gain), bias=shift)
        expected = centred / size * gain + (0 if shift is None else shift)
        normed = layers.apply_norm(params, jnp.asarray(x), kind, 0.3)
        np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=1e-6)
    plain = layers.apply_norm(None, jnp.asarray(x), kind, 0.3)
    np.testing.assert_allclose(plain, centred / size, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_an_activation_is_its_argument_times_its_gate(name, x64):
    z = np.append(np.linspace(-6, 6, 101), 0.0)
    fn, gate = layers.ACTIVATIONS[name]
    slope = jax.vmap(jax.grad(lambda t: gate(t[None])[0]))
    values, gates, slopes = jax.jit(lambda z: (fn(z), gate(z), slope(z)))(z)
    assert_close(values, z * gates, rtol=1e-12, atol=1e-14)
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("kind", [k for k in layers.MLP_KINDS if k != "none"])
def test_mlp_matches_numpy(kind, x64):
    assert ("none", *layers.ACTIVATIONS, *layers.GATED) == layers.MLP_KINDS
    p = {n: draws.normal(*shape, seed=i) for i, (n, shape) in enumerate(SHAPES.items())}
    p, x = jax.device_get((layers.MLPParams(**p), draws.normal(3, 4, seed=6)))
    linear, gate = x @ p.w_in + p.b_in[None], x @ p.w_gate + p.b_gate[None]
    gated = kind in layers.GATED
    hidden = NUMPY_PHI[layers.GATED.get(kind, kind)](np.asarray(gate if gated else linear))
    hidden = hidden * linear if gated else hidden
    expected = hidden @ p.w_out + p.b_out[None]
    output = jax.jit(layers.apply_mlp, static_argnums=2)(p, x, kind)
    assert_close(output, expected, rtol=1e-10)


SHAPES = {"w_in": (4, 6), "b_in": (6,), "w_out": (6, 4), "b_out": (4,)}
SHAPES |= {"w_gate": (4, 6), "b_gate": (6,)}
NUMPY_PHI = {
    "identity": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * special.ndtr(z),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "quick_gelu": lambda z: z * special.expit(1.702 * z),
    "silu": lambda z: z * special.expit(z),
    "tanh": np.tanh,
}


TABLES = {"vocab_size": 3, "d_embed": 4, "positions": "learned", "num_positions": 2}
FEW = rc.EmbeddingConfig(**TABLES)


def embed(x):
    return rc.network.embed(init_embedding(jax.random.key(0), FEW, 4), x, FEW)


@parametrize_refusals(
    [
        (lambda: layers.apply_norm(None, tokens(), "batch"), "norm='batch'"),
        (lambda: layers.get_activation("maxout"), "mlp='maxout'"),
        (lambda: rc.EmbeddingConfig(vocab_size=3, d_input=2), "vocab_size=3 and d_input=2"),
        (lambda: rc.EmbeddingConfig(vocab_size=3, projection="twice"), "projection='twice'"),
        (lambda: init_embedding(jax.random.key(0), FEW, 5), "d_embed=4 is not d_model=5"),
        (lambda: embed(jnp.array([0, 1, 2])), "3 tokens are more than num_positions=2"),
        (lambda: embed(jnp.zeros((2, 4))), r"shape \(2, 4\)"),
    ]
)
def test_errors_name_the_value(arguments, message):
    is_refused(message, *arguments)


def norm(x, p, eps=1e-12):
    x, p = np.asarray(x), jax.tree.map(np.asarray, p)
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + eps)
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
    rest = config.class_token, config.num_registers, config.place_registers, config.hidden_layer
    assert not any((*rest, config.convolutions, config.d_input, config.num_positions))


KEYS, SHAPE = 1500, (30, 48)


def draw_decisions(rate):
    """Draws dropout decisions [keys, entries] as 0 and 1."""
    keys = jax.random.split(jax.random.key(0), KEYS)
    out = jax.jit(jax.vmap(lambda k, r: dropout.dropout(k, jnp.ones(SHAPE), r), (0, None)))
    return np.asarray(out(keys, rate) == 0).reshape(KEYS, -1).astype(float)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_independence_within_statistics(rate):
    centred = draw_decisions(rate) - rate
    variance = rate * (1 - rate)
    assert abs(centred.mean()) < 4 * np.sqrt(variance / centred.size)
    # Correlations of neighbours, of rows of the array, and of consecutive keys.
    for lag in (1, 2, 3, 8, 16, 48, 64):
        products = centred[:, lag:] * centred[:, :-lag] / variance
        assert abs(products.mean()) < 4.5 / np.sqrt(products.size), lag
    products = centred[1:] * centred[:-1] / variance
    assert abs(products.mean()) < 4.5 / np.sqrt(products.size)
    # Totals per entry and per key vary as binomial counts do.
    for axis in (0, 1):
        totals = centred.sum(axis=axis)
        ratio = totals.var() / (variance * centred.shape[axis])
        assert abs(ratio - 1) < 5 * np.sqrt(2 / len(totals))


def test_kept_entries_are_scaled_and_the_limits_hold():
    x = jnp.arange(1.0, 1001.0)
    out = np.asarray(dropout.dropout(jax.random.key(1), x, 0.25))
    is_nonzero = out != 0
    np.testing.assert_allclose(out[is_nonzero], np.asarray(x)[is_nonzero] / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(dropout.dropout(jax.random.key(1), x, 0.0), x)
    np.testing.assert_array_equal(dropout.dropout(jax.random.key(1), x, 1.0), 0)


@pytest.mark.full
def test_a_key_decides_alike_alone_and_under_vmap_and_in_any_dtype():
    keys = jax.random.split(jax.random.key(2), 4)
    x = jnp.ones((5, 7))
    together = jax.vmap(lambda k: dropout.dropout(k, x, 0.5))(keys)
    for key, row in zip(keys, together, strict=True):
        np.testing.assert_array_equal(dropout.dropout(key, x, 0.5), row)
        words = dropout.dropout_words(key)
        np.testing.assert_array_equal(dropout.dropout(words, x, 0.5), row)
        np.testing.assert_array_equal(dropout.dropout_words(words), words)
        half = dropout.dropout(key, x.astype(jnp.bfloat16), 0.5)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_array_equal(half.astype(jnp.float32), row)
    assert (together[0] != together[1]).any()


def test_words_of_a_part_do_not_depend_on_how_many_parts_there_are():
    """Nor are they the bits by which the trunk drops its first entries."""
    trunk = dropout.dropout_words(jax.random.key(3))
    branches = np.asarray(dropout.dropout_branches(trunk, 40))
    np.testing.assert_array_equal(dropout.dropout_branches(trunk, 3), branches[:3])
    np.testing.assert_array_equal(dropout.dropout_branches(jax.random.key(3), 3), branches[:3])
    assert len(np.unique(branches, axis=0)) == 40
    of_key, of_words = (dropout.dropout(k, jnp.ones(9), 0.5) for k in (jax.random.key(3), trunk))
    np.testing.assert_array_equal(of_key, of_words)
    by_word = (branches.ravel() >> 8) < 2**23  # as the entries of a rate of a half
    dropped = np.asarray(dropout.dropout(trunk, jnp.ones(80), 0.5)) == 0
    assert 0.2 < np.mean(by_word != dropped) < 0.8
    with pytest.raises(ValueError, match=r"dropout_key of shape \(3,\) is not a random key"):
        dropout.dropout_words(jnp.ones(3, jnp.uint32))


def test_either_word_of_a_key_decides():
    """Of 2,000 entries two keys that differ in one word drop half alike, to 5 deviations."""
    words = np.array([[1, 2], [1, 3], [2, 2]], np.uint32)
    kept = [np.asarray(dropout.dropout(key, jnp.ones(2000), 0.5)) != 0 for key in words]
    for first, second in itertools.combinations(kept, 2):
        assert abs(np.mean(first == second) - 0.5) < 5 * 0.5 / np.sqrt(2000)


@pytest.mark.full
def test_branches_are_independent_of_each_other_and_of_their_trunk():
    trunk = dropout.dropout_words(jax.random.key(3))
    branches = dropout.dropout_branches(trunk, KEYS)
    np.testing.assert_array_equal(dropout.dropout_branches(trunk, 3), branches[:3])
    assert len(np.unique(np.asarray(branches), axis=0)) == KEYS
    drop = jax.vmap(lambda w: dropout.dropout(w, jnp.ones(SHAPE), 0.5) == 0)
    centred = np.asarray(drop(branches)).reshape(KEYS, -1) - 0.5
    for lag in (1, 2, 7):
        products = centred[lag:] * centred[:-lag] / 0.25
        assert abs(products.mean()) < 4.5 / np.sqrt(products.size), lag
    totals = centred.sum(axis=0)
    assert abs(totals.var() / (0.25 * KEYS) - 1) < 5 * np.sqrt(2 / len(totals))
    trunk_drops = np.asarray(dropout.dropout(trunk, jnp.ones(SHAPE), 0.5) == 0).ravel() - 0.5
    assert abs((centred * trunk_drops / 0.25).mean()) < 4.5 / np.sqrt(centred.size)


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


def test_no_two_parameters_of_a_layer_are_drawn_alike():
    """One head as wide as the tokens, so that matrices, and biases, have equally many entries."""
    config = rc.TransformerConfig(1, 1, 6, d_ff=6, mlp="swiglu", cross_attention=True)
    leaves = jax.tree.leaves(init_block(jax.random.key(0), config, 1.0, 1.0))
    units = {tuple(np.round(np.ravel(a) / np.linalg.norm(a), 4)) for a in map(np.asarray, leaves)}
    assert len(units) == len(leaves)
