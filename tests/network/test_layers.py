"""Norms, activations and MLPs against numpy."""

import draws
import jax
import jax.numpy as jnp
import numpy as np
import numpy_network
import pytest
from marks import slow_but
from refusals import each_is_refused
from scipy import special

import rank_collapse as rc
from rank_collapse.network import layer_gains, layers
from rank_collapse.network.embedding import init_embedding, sinusoidal_positions
from rank_collapse.theory.stability import expected_pass


def tokens(n=5, d=8, seed=3):
    return 2.0 + 3.0 * jax.random.normal(jax.random.key(seed), (n, d))


def test_layer_norm_matches_numpy():
    x = np.asarray(tokens())
    gain, bias = np.linspace(0.5, 2, 8), np.linspace(-1, 1, 8)
    params = layers.NormParams(gain=jnp.asarray(gain), bias=jnp.asarray(bias))
    centred = x - x.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt(x.var(axis=1, keepdims=True) + 0.3) * gain + bias
    np.testing.assert_allclose(
        layers.norm(params, jnp.asarray(x), "layer", 0.3), expected, rtol=1e-5, atol=1e-6
    )


def test_rms_norm_matches_numpy():
    x = np.asarray(tokens())
    gain = np.linspace(0.5, 2, 8)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 0.3) * gain
    got = layers.norm(layers.NormParams(gain=jnp.asarray(gain)), jnp.asarray(x), "rms", 0.3)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_norm_without_parameters_standardises(x64):
    y = layers.norm(None, tokens(), "layer", 0.0)
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-14)
    np.testing.assert_allclose(y.var(axis=1), 1, rtol=1e-13)


def test_layer_norm_ignores_scale_and_shift(x64):
    x = tokens()
    np.testing.assert_allclose(
        layers.norm(None, x, "layer", 0.0), layers.norm(None, 7 * x - 2, "layer", 0.0), rtol=1e-9
    )


def test_unknown_norm_names_the_value():
    with pytest.raises(ValueError, match="norm='batch'"):
        layers.norm(None, tokens(), "batch")


@pytest.mark.parametrize("name", layers.ACTIVATIONS)
def test_an_activation_is_its_argument_times_its_gate(name, x64):
    z = jnp.concatenate([jnp.linspace(-6, 6, 101), jnp.zeros(1)])
    fn, gate = layers.ACTIVATIONS[name]
    np.testing.assert_allclose(fn(z), z * gate(z), rtol=1e-12, atol=1e-14)
    assert np.isfinite(jax.vmap(jax.grad(lambda t: gate(t[None])[0]))(z)).all()


@pytest.mark.parametrize("kind", [k for k in layers.MLP_KINDS if k != "none"])
def test_mlp_matches_numpy(kind, x64):
    keys = jax.random.split(jax.random.key(0), 7)
    draw = [jax.random.normal(k, s) for k, s in zip(keys[:6], SHAPES, strict=True)]
    names = ("w_in", "b_in", "w_out", "b_out", "w_gate", "b_gate")
    p = layers.MLPParams(**dict(zip(names, draw, strict=True)))
    x = jax.random.normal(keys[6], (3, 4))
    linear, gate = x @ p.w_in + p.b_in[None], x @ p.w_gate + p.b_gate[None]
    if kind in layers.GATED:
        hidden = NUMPY_PHI[layers.GATED[kind]](np.asarray(gate)) * linear
    else:
        hidden = NUMPY_PHI[kind](np.asarray(linear))
    expected = hidden @ p.w_out + p.b_out[None]
    np.testing.assert_allclose(layers.mlp(p, x, kind), expected, rtol=1e-10)


SHAPES = ((4, 6), (6,), (6, 4), (4,), (4, 6), (6,))
NUMPY_PHI = {
    "identity": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * special.ndtr(z),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "quick_gelu": lambda z: z * special.expit(1.702 * z),
    "silu": lambda z: z * special.expit(z),
    "tanh": np.tanh,
}


def test_unknown_mlp_names_the_value():
    with pytest.raises(ValueError, match="mlp='maxout'"):
        layers.activation_of("maxout")


def test_kinds_of_mlps_are_those_that_there_are():
    assert ("none", *layers.ACTIVATIONS, *layers.GATED) == layers.MLP_KINDS


# Embeddings step by step in numpy.


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


# Gains of skips and branches: of each kind of sublayer, by layer and by feature.


L, H, N, D = 3, 2, 5, 6
ALPHA = np.array([0.7, 1.1, 0.4])
FEATURES = np.linspace(0.5, 1.5, L * D).reshape(L, D)


def build(**fields):
    config = rc.transformer(L, H, D, mlp="tanh", d_ff=7, **fields)
    return config, draws.parameters(config), draws.tokens(N, D)


@pytest.mark.parametrize("placement", slow_but(["post", "pre"], "post"))
@pytest.mark.parametrize("kind", slow_but(["number", "layers", "features", "kinds"], "kinds"))
def test_gains_are_as_written_out(x64, placement, kind):
    values = {"number": 0.7, "layers": ALPHA, "features": FEATURES}
    value = values.get(kind, rc.Gains(attention=FEATURES, mlp=ALPHA))
    ones = jax.tree.map(lambda a: a * 0 + 1, value)  # of one structure: one program
    config, params, x = build(norm_placement=placement)
    for gains in ((value, ones), (ones, value)):
        with_gain = config.replace(skip_gain=gains[0], branch_gain=gains[1])
        trace = jax.jit(rc.apply)(params, x, with_gain)
        states, _ = numpy_network.states(params, x, with_gain)
        np.testing.assert_allclose(trace.hidden, states, rtol=1e-9, atol=1e-9)
        parts = jax.jit(rc.path_contributions)(params, x, with_gain)
        np.testing.assert_allclose(parts.total, trace.output, rtol=1e-9, atol=1e-9)
        path = jnp.full(L, -1)
        state = rc.path_state(params, x, with_gain, path, semantics="recomputed")
        np.testing.assert_allclose(state, trace.output, rtol=1e-9, atol=1e-9)
        profile = rc.log_residual_profile(params, x, with_gain)
        plain = [rc.composite_norm(rc.residual(h)) for h in trace.hidden]
        np.testing.assert_allclose(profile, np.log10(plain), atol=1e-6)


def test_a_gain_of_another_shape_is_refused():
    config, params, x = build(skip_gain=np.ones(D))
    each_is_refused(
        (lambda: rc.apply(params, x, config), r"skip_gain of shape \(6,\) is not .* use jax.vmap"),
        (
            lambda: layer_gains(config.replace(skip_gain=1.0, temperature=FEATURES), jnp.float32),
            r"temperature of shape \(3, 6\)",
        ),
    )


def test_a_width_that_was_not_given_follows():
    config = rc.transformer(2, 2, 8)
    assert config.ff_width == 32 and config.replace(d_model=16).ff_width == 64
    assert config.replace(d_ff=20).replace(d_model=16).ff_width == 20
    assert rc.transformer(2, 2, 8, d_ff=32).replace(d_model=16).ff_width == 32
    params = rc.init(jax.random.key(0), config.replace(d_model=16))
    assert params.layers.mlp.w_in.shape == (2, 16, 64)


# Measures ask for full precision of every matrix product, whatever the caller's default.


N_PRECISION, D_PRECISION = 5, 8
CONFIG = rc.transformer(2, 2, D_PRECISION, d_ff=9)
SAN = rc.san(2, 2, D_PRECISION)
PATHS = np.zeros((1, 2, 2), int)
CLASSIFIER = (np.ones((D_PRECISION, 3), np.float32), np.zeros(3, np.float32))
MEASURES = {
    "path_contributions": lambda p, x: rc.path_contributions(p, x, CONFIG).by_length,
    "head_contributions": lambda p, x: rc.head_contributions(p, x, CONFIG),
    "path_state": lambda p, x: rc.path_state(p, x, CONFIG, PATHS[0, 0]),
    "path_set_states": lambda p, x: rc.path_set_states(p, x, CONFIG, PATHS),
    "path_set_logits": lambda p, x: rc.path_set_logits(p, CLASSIFIER, x, CONFIG, PATHS),
    "log_residual_profile": lambda p, x: rc.log_residual_profile(p, x, CONFIG),
    "bound_report": lambda p, x: (
        rc.bound_report(p.replace(layers=p.layers.replace(mlp=None)), x, SAN).layer.tightness
    ),
    "truncated": lambda p, x: rc.truncated(p, x, CONFIG, 1).output,
    "monitor": lambda _, x: rc.monitor(x),
    "participation_ratio": lambda _, x: rc.participation_ratio(x),
    "shapley_values": lambda _, x: rc.shapley_values(x[:4], 2),
    "covariance_shares": lambda _, x: rc.covariance_shares(x[None], x),
    "expected_pass": lambda p, x: expected_pass(p, x, CONFIG).shares,
    "network_profile": lambda p, x: rc.network_profile(p, x, CONFIG)["residual_ratio"],
}


def products(jaxpr):
    """Precisions of all matrix products, those inside loops, branches and calls too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner)


@pytest.mark.parametrize("name", MEASURES)
def test_every_product_of_a_measure_has_full_precision(name):
    params = rc.init(jax.random.key(0), CONFIG)
    x = jax.random.normal(jax.random.key(1), (N_PRECISION, D_PRECISION))
    with jax.default_matmul_precision("bfloat16"):
        found = set(products(jax.make_jaxpr(MEASURES[name])(params, x).jaxpr))
        forward = set(
            products(jax.make_jaxpr(lambda p, x: rc.apply(p, x, CONFIG))(params, x).jaxpr)
        )
    highest = jax.lax.Precision.HIGHEST
    assert found == {(highest, highest)}
    assert forward and (highest, highest) not in forward  # the caller's choice, as in training
