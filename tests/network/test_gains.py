"""Gains of skips and branches: of each kind of sublayer, by layer and by feature."""

import draws
import jax
import jax.numpy as jnp
import mp_oracle
import numpy as np
import pytest
from marks import slow_but
from refusals import refused

import rank_collapse as rc
from rank_collapse.network.gains import layer_gains

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
        states, _ = mp_oracle.states(params, x, with_gain)
        np.testing.assert_allclose(trace.hidden, states, rtol=1e-9, atol=1e-9)
        parts = jax.jit(rc.path_contributions)(params, x, with_gain)
        np.testing.assert_allclose(parts.total, trace.output, rtol=1e-9, atol=1e-9)
        path = jnp.full(L, -1)
        state = rc.path_state(params, x, with_gain, path, semantics="recomputed")
        np.testing.assert_allclose(state, trace.output, rtol=1e-9, atol=1e-9)
        profile = rc.log_residual_profile(params, x, with_gain)
        plain = [rc.composite_norm(rc.residual(h)) for h in trace.hidden]
        np.testing.assert_allclose(profile, np.log10(plain), atol=1e-6)


test_a_gain_of_another_shape_is_refused = refused(
    [
        ({"skip_gain": np.ones(D)}, r"skip_gain of shape \(6,\) is not .* use jax.vmap"),
        ({"temperature": FEATURES}, r"temperature of shape \(3, 6\)"),
    ],
    lambda fields: layer_gains(build(**fields)[0], jnp.float32),
)


def test_a_width_that_was_not_given_follows():
    config = rc.transformer(2, 2, 8)
    assert config.ff_width == 32 and config.replace(d_model=16).ff_width == 64
    assert config.replace(d_ff=20).replace(d_model=16).ff_width == 20
    assert rc.transformer(2, 2, 8, d_ff=32).replace(d_model=16).ff_width == 32
    params = rc.init(jax.random.key(0), config.replace(d_model=16))
    assert params.layers.mlp.w_in.shape == (2, 16, 64)
