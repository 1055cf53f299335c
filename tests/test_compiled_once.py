"""Another call with equal shapes compiles nothing, outside of jit and with other floats inside."""

import logging

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow_if

import rank_collapse as rc
from rank_collapse.measures import dependency
from rank_collapse.measures.centers import composite_center
from rank_collapse.paths.chains import branch_sizes, predicted_sizes
from rank_collapse.theory.stability import collapse_law

SAN = rc.san_skip(2, 2, 4)
PATHS = np.array([[0, 1], [2, 1]])
READ_OUT = (np.ones((4, 2), np.float32), np.zeros(2, np.float32))


def of_trace(measure):
    def call(seed):
        params, config = draws.parameters(SAN, seed), SAN.replace(skip_gain=1.0 + seed)
        return measure(params, rc.apply(params, draws.tokens(3, 4, seed), config), config)

    return call


CALLS = {
    "branch_shares": of_trace(dependency.branch_shares),
    "branch_sizes": of_trace(branch_sizes),
    "dependency": lambda seed: dependency.dependency(np.array([0.5, 0.1 * seed], np.float32)),
    "predicted_sizes": lambda seed: predicted_sizes(0.3 + 0.1 * seed, 3, 2),
    "collapse_law": lambda seed: collapse_law(0.1 * seed, 4, jnp.ones(3) + seed, jnp.ones(3)),
    "composite_center": lambda seed: composite_center(draws.tokens(3, 4, seed)),
    "path_set_logits": lambda seed: rc.path_set_logits(
        draws.parameters(SAN, seed), READ_OUT, draws.tokens(3, 4, seed), SAN, (PATHS + seed) % 3
    ),
    "monitored": lambda seed: rc.monitored(
        draws.parameters(SAN, seed), draws.tokens(3, 4, seed), SAN
    ),
}


@pytest.mark.parametrize("name", slow_if(CALLS, "composite_center"))
def test_a_second_call_compiles_nothing(name, caplog):
    jax.block_until_ready(CALLS[name](0))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.block_until_ready(CALLS[name](1))
        again = [m for m in caplog.messages if m.startswith("Compiling")]
        assert not again
        jax.jit(lambda a: a + name.count("a"))(0.0)
    assert any(m.startswith("Compiling") for m in caplog.messages)  # it would have been seen


SWEPT = {  # of a network whose gains and temperature are swept
    "apply": lambda p, x, c: rc.apply(p, x, c).output,
    "path_contributions": lambda p, x, c: (
        rc.path_contributions(p, x, c, head_gain=jnp.full((3, 2), c.temperature)).by_length
    ),
    "path_set_states": lambda p, x, c: rc.path_set_states(
        p, x, c, jnp.array([[[0, 1, 2], [2, 1, 1]]]) % (1 + c.temperature).astype(int)
    ),
    "log_residual_profile": rc.log_residual_profile,
    "bound_report": lambda p, x, c: rc.bound_report(p, x, c).layer.tightness,
}
GAINS = jnp.array([0.0, 0.5, 1.0])


@pytest.mark.parametrize("name", slow_if(SWEPT, "log_residual_profile"))
def test_swept_floats_are_one_program_and_vmap_changes_no_number(name):
    config, x, traces = rc.san_skip(3, 2, 8), draws.tokens(5, 8), []
    seeds = [draws.parameters(config, seed) for seed in range(3)]

    @jax.jit
    def measured(params, gain):
        traces.append(1)
        swept = {"skip_gain": gain, "branch_gain": 1 - gain / 2, "temperature": 1 + gain}
        return SWEPT[name](params, x, config.replace(**swept))

    alone = np.stack([measured(seeds[1], gain) for gain in GAINS])
    assert len(traces) == 1 and len(np.unique(alone, axis=0)) == 3
    by_gain = jax.vmap(measured, (None, 0))(seeds[1], GAINS)
    np.testing.assert_allclose(by_gain, alone, rtol=1e-4, atol=1e-4)
    by_seed = jax.vmap(measured, (0, None))(jax.tree.map(lambda *a: jnp.stack(a), *seeds), GAINS[1])
    np.testing.assert_allclose(by_seed[1], alone[1], rtol=1e-4, atol=1e-4)
