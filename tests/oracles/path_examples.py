"""Examples without symmetry for the tests of path sums."""

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.trained.chains import ChainPass
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.passes import run_pass
from tests.oracles import draws

N, D, DEPTH, HEADS = 5, 8, 3, 2


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def config_of(**fields):
    defaults = {"depth": DEPTH, "num_heads": HEADS, "d_model": D, "d_ff": 11}
    return rc.TransformerConfig(**(defaults | fields))


def example(config, seed=0, n=N):
    """Draws (parameters without symmetry, tokens, other inputs that the configuration needs)."""

    x = draws.tokens(n, config.d_model, seed + 1)
    extra = {}
    if config.cross_attention:
        extra["memory"] = draws.tokens(n - 1, config.d_model, seed + 2, shift=0.0)
        extra["memory_mask"] = jnp.arange(n - 1) < n - 2
    return draws.parameters(config, seed), x, extra


def over_batch(measure, params, config, inputs, **static):
    """Computes measure(params, x, config, ...) for each example of a batch [b, ...] at once."""

    def measure_example(example_inputs):
        example_inputs = dict(example_inputs)
        return measure(params, example_inputs.pop("x"), config, **example_inputs, **static)

    arrays = {name: jnp.asarray(a) for name, a in inputs.items() if a is not None}
    return jax.device_get(jax.jit(jax.vmap(measure_example))(arrays))


def profile_in_memory(params, x, config, *, measures=("residual_ratio",), **inputs):
    """Computes the profile of a network's states from its trace, as `ProfilePass` streams it."""
    trace = rc.apply(params, x, config, **inputs)
    return rc.profile(trace, measures=measures, mask=inputs.get("mask"))


def heads_in_memory(params, x, config, **inputs):
    """Computes what `measure_heads` streams from a full trace."""
    weights, mask = rc.apply(params, x, config, **inputs).attention, inputs.get("mask")
    return {
        "entropy": rc.attention_entropy(weights, mask=mask),
        "largest_weight": rc.measures.largest_weight(weights, mask=mask),
        "largest_column": rc.measures.largest_column(weights, mask=mask),
        "first_column": rc.measures.first_column(weights, mask=mask, key_mask=mask),
    }


def chain_effects(params, x, config, *, num_paths=5, **inputs):
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return jax.jit(run_pass, static_argnums=0)(ChainPass(num_paths), params, prepared, config)
