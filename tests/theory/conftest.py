"""Networks and their reports, computed once for each file."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.oracles.bound_reports import GAIN, GAINS, TEMPERATURE, make_report


@pytest.fixture(scope="module")
def head_cases():
    """{heads: (parameters, tokens, configuration, report)} in float64."""
    with jax.enable_x64(True):
        sizes = {"d_qk": 4, "d_v": 2}
        one = rc.san(3, 1, 6, branch_gain=rc.Gains(attention=GAIN), **sizes)
        three = rc.san_mlp(2, 3, 6, mlp="tanh", d_ff=7, branch_gain=GAINS, **sizes)
        made = {}
        for config in (one, three.replace(temperature=TEMPERATURE)):
            params, x = draws.parameters(config, 0, 0.7, 0.5), 0.2 * draws.tokens(5, 6, shift=0.0)
            x = x * config.num_heads
            head_sizes = np.array([1, 0.3, 3])[None, : config.num_heads, None, None]  # unequal
            params = draws.changed(
                params, attention={"w_v": params.layers.attention.w_v * head_sizes}
            )
            made[config.num_heads] = params, x, config, make_report(params, x, config)
    return made
