"""Gains of skips and branches: written out, folded into weights, profiled by Admin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.residual import (
    ResidualSpec,
    init_gains,
    layer_gains,
    scale_summands,
)
from rank_collapse.network.walk import walk_layers
from tests.oracles import draws, mp_network
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

L, H, N, D = 3, 2, 5, 8
ALPHA = np.array([0.7, 1.1, 0.4])
FEATURES = np.linspace(0.5, 1.5, L * D).reshape(L, D)


def make_network(**fields):
    config = rc.transformer(L, H, D, mlp="tanh", d_ff=7, **fields)
    return config, draws.parameters(config), draws.tokens(N, D)


@pytest.mark.full
@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("kind", ["number", "layers", "features", "kinds"])
def test_gains_are_as_written_out(x64, placement, kind):
    values = {"number": 0.7, "layers": ALPHA, "features": FEATURES}
    value = values.get(kind, rc.Gains(attention=FEATURES, mlp=ALPHA))
    ones = jax.tree.map(lambda a: a * 0 + 1, value)  # of one structure: one program
    config, params, x = make_network(norm_placement=placement)
    for gains in ((value, ones), (ones, value)):
        with_gain = config.replace(skip_gain=gains[0], branch_gain=gains[1])
        trace = jax.jit(rc.apply)(params, x, with_gain)
        states, _ = mp_network.states(params, x, with_gain)
        assert_close(trace.hidden, states, rtol=1e-9, atol=1e-9)
        parts = jax.jit(rc.path_contributions)(params, x, with_gain)
        assert_close(parts.total, trace.output, rtol=1e-9, atol=1e-9)
        path = jnp.full(L, -1)
        state = rc.paths.path_state(params, x, with_gain, path, semantics="recomputed")
        assert_close(state, trace.output, rtol=1e-9, atol=1e-9)
        profile = rc.log_residual_profile(params, x, with_gain)
        plain = [rc.composite_norm(rc.residual(h)) for h in trace.hidden]
        assert_close(profile, np.log10(plain), atol=1e-6)


@parametrize_refusals(
    [
        ({"skip_gain": np.ones(D)}, r"skip_gain of shape \(8,\) is not .* use jax.vmap"),
        ({"temperature": FEATURES}, r"temperature of shape \(3, 8\)"),
        (
            {"mixing": rc.network.Mixing(np.ones((H, L)))},
            r"mixing of shape \(2, 3\) is not \(\), \(3,\) or \(3, 2\)",
        ),
    ]
)
def test_a_gain_of_another_shape_is_refused(arguments, message):
    (fields,) = arguments
    is_refused(message, lambda: layer_gains(make_network(**fields)[0], jnp.float32))


def test_learned_gains_multiply_given_ones_layer_by_layer_and_feature_by_feature():
    """Whichever of the two has features; a sublayer without learned gains does not matter."""
    learned = np.float32([2.0, 3.0, 5.0])
    for value, is_by_feature in ((FEATURES, False), (ALPHA, True), (FEATURES, True), (0.5, False)):
        fields = {"skip_gain": value, "branch_gain": 2 * value, "learned_skip_gain": learned}
        config, params, _ = make_network(learned_per_feature=is_by_feature, **fields)
        gain = np.asarray(params.layers.mlp_gains.skip, np.float64)
        assert gain.shape == ((L, D) if is_by_feature else (L,))
        gains = layer_gains(config, jnp.float32, params)
        full = [np.asarray(a) if np.ndim(a) == 2 else np.full(L, a)[:, None] for a in (value, gain)]
        expected = np.prod(np.broadcast_arrays(*full), axis=0)
        shape = gains.skip.mlp.shape
        assert shape == ((L, D) if is_by_feature or value is FEATURES else (L,))
        assert_close(gains.skip.mlp.reshape(L, -1), expected, rtol=1e-6)
        np.testing.assert_allclose(
            gains.branch.mlp, np.full(L, 2 * value) if np.ndim(value) < 2 else 2 * value, rtol=1e-6
        )
        message = "learned_skip_gain is set: its gains are in the parameters"
        is_refused(message, layer_gains, config, jnp.float32)


def test_learned_gains_begin_at_those_of_each_feature_where_they_are_learned_so():
    config, params = make_network(learned_per_feature=True, learned_branch_gain=FEATURES)[:2]
    for kind in ("attention", "mlp"):
        gains = init_gains(config)[f"{kind}_gains"]
        assert_close(gains.branch, FEATURES, rtol=1e-6)
        assert gains.skip is None
        assert getattr(params.layers, f"{kind}_gains").branch.shape == (L, D)
    message = "learned_branch_gain is given per feature, but learned_per_feature=False"
    is_refused(message, init_gains, config.replace(learned_per_feature=False))
    by_layer = init_gains(config.replace(learned_branch_gain=ALPHA))["mlp_gains"].branch
    assert_close(by_layer, np.tile(ALPHA[:, None], D), rtol=1e-6)


def test_both_sides_of_a_sum_have_their_gains_and_the_branch_has_its_norm():
    """Without a skip the stream is returned as it is."""
    x, a = np.array([[3.0, 4.0]]), np.array([[1.0, 5.0]])
    spec = ResidualSpec(None, None, 2.0, np.array([0.5, 3]), "mlp", True, "pre", "layer", 1e-12)
    for changes, stream, branch in (
        ({}, 2 * x, [[0.5, 15]]),
        ({"skip": False}, x, [[0.5, 15]]),
        ({"placement": "branch"}, 2 * x, [[-0.5, 3]]),
        ({"placement": "post"}, 2 * x, [[0.5, 15]]),
    ):
        sides = scale_summands(spec.replace(**changes), jnp.asarray(x), jnp.asarray(a))
        np.testing.assert_allclose(sides[0], stream, rtol=1e-6)
        np.testing.assert_allclose(sides[1], branch, rtol=1e-6)


def test_a_width_that_was_not_given_follows():
    config = rc.transformer(2, 2, 8)
    assert config.ff_width == 32 and config.replace(d_model=16).ff_width == 64
    assert config.replace(d_ff=20).replace(d_model=16).ff_width == 20
    assert rc.transformer(2, 2, 8, d_ff=32).replace(d_model=16).ff_width == 32
    params = draws.parameters(config.replace(d_model=16))
    assert params.layers.mlp.w_in.shape == (2, 16, 64)


def test_layers_that_share_parameters_have_those_of_their_row():
    """The map (0, 0, 1, 1), in which neither layer l nor l modulo 2 is the row."""
    config = rc.san_skip(4, 2, D, layer_map=(0, 0, 1, 1), learned_branch_gain=1.0)
    params, prepared = prepare_inputs(draws.parameters(config), draws.tokens(N, D), config)
    gains = layer_gains(config, jnp.float32, params).branch.attention
    np.testing.assert_array_equal(
        gains, params.layers.attention_gains.branch[jnp.array([0, 0, 1, 1])]
    )

    def step(layer, state):
        return state, layer.params.attention.w_q

    _, weights = walk_layers(step, 0.0, params, prepared, config)
    expected = params.layers.attention.w_q[jnp.array([0, 0, 1, 1])]
    np.testing.assert_array_equal(weights, expected)


def test_mixing_by_layer_is_the_same_for_all_heads_of_a_layer():
    mixing = rc.network.Mixing(identity=jnp.array([0.1, 0.2]))
    config = rc.san(2, 2, D, mixing=mixing)
    identity = layer_gains(config, jnp.float32).mixing.identity
    assert_close(identity, [[0.1, 0.1], [0.2, 0.2]])
