"""Examples without symmetry for the tests of path sums."""

import draws
import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from experiments.paper.trained.chains import ChainPass
from experiments.train.path_sizes import measured_sizes
from rank_collapse.measures.residuals import residual_ratio
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.measured.influence import mean_cosine, zero_padding
from rank_collapse.network.passes import run_pass
from rank_collapse.paths.contributions import PathContributions

N, D, DEPTH, HEADS = 5, 8, 3, 2


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def config_of(**fields):
    defaults = {"depth": DEPTH, "num_heads": HEADS, "d_model": D, "d_ff": 11}
    return rc.TransformerConfig(**(defaults | fields))


def example(config, seed=0, n=N):
    """Parameters without symmetry, an input, and what else the configuration needs."""

    x = draws.tokens(n, config.d_model, seed + 1)
    extra = {}
    if config.cross_attention:
        extra["memory"] = draws.tokens(n - 1, config.d_model, seed + 2, shift=0.0)
        extra["memory_mask"] = jnp.arange(n - 1) < n - 2
    return draws.parameters(config, seed), x, extra


def sizes_of(found: PathContributions, *, mask=None):
    """The exact contribution of the paths of each length to the output, of all lengths at once.

    With C_k the sum of all paths of length k and Y the output (frozen attention, norms, gates),
    arrays [L + 1]; offset_size and error are scalars:

    size            ‖C_k‖_F / ‖Y‖_F, which is also how far the output moves without length k
    residual_size   ‖res C_k‖_F / ‖res Y‖_F, the same of the differences of tokens
    residual_ratio  ‖res C_k‖_{1,∞} / ‖C_k‖_{1,∞}: how near to rank one length k is by itself
    cosine_without  mean over tokens of cos(Y_i, Y_i − C_{k,i})
    cosine_up_to    mean over tokens of cos(Y_i, Σ_{j≤k} C_{j,i} + offset_i)
    error_up_to     ‖Y − Σ_{j≤k} C_j − offset‖_F / ‖Y‖_F
    log10_size, log10_residual   log10 of ‖C_k‖_{1,∞} and ‖res C_k‖_{1,∞}, to set beside α's law
    offset_size     ‖offset‖_F / ‖Y‖_F, what biases add whatever the tokens
    error           ‖Y − Σ_k C_k − offset‖_F / ‖Y‖_F, rounding

    Args:
        mask: Bool [n], the tokens that exist; others count nowhere.

    Source: the path decomposition of Dong et al. 2021 (Theorem 2.1), with every path summed.
    """
    keep = jnp.ones(len(found.output), bool) if mask is None else mask
    every = (found.by_attention_length, found.output, found.up_to(), found.all_but())
    parts, output, up_to, without = (zero_padding(a, keep) for a in every)
    size = jnp.linalg.norm(output)

    def rest(a):
        return zero_padding(a - (jnp.sum(a, axis=-2, keepdims=True) / jnp.sum(keep)), keep)

    def frobenius(a):
        return jnp.sqrt(jnp.sum(jnp.square(a), axis=(-2, -1)))

    log_size, log_residual = measured_sizes(parts, mask=keep)
    return {
        "log10_size": log_size,
        "log10_residual": log_residual,
        "size": frobenius(parts) / size,
        "residual_size": frobenius(rest(parts)) / frobenius(rest(output)),
        "residual_ratio": jax.vmap(lambda a: residual_ratio(a, mask=keep))(parts),
        "cosine_without": mean_cosine(without, output, keep),
        "cosine_up_to": mean_cosine(up_to, output, keep),
        "error_up_to": frobenius(up_to - output[None]) / size,
        "offset_size": jnp.linalg.norm(zero_padding(found.offset, keep)) / size,
        "error": frobenius(zero_padding(found.total, keep) - output) / size,
    }


def length_effects(params, x, config, *, mask=None):
    return sizes_of(rc.path_contributions(params, x, config, mask=mask), mask=mask)


def over_batch(measure, params, config, inputs, **static):
    """measure(params, x, config, ...) of every example of a batch [b, ...], in one program."""

    def one(own):
        own = dict(own)
        return measure(params, own.pop("x"), config, **own, **static)

    given = {name: jnp.asarray(a) for name, a in inputs.items() if a is not None}
    return jax.device_get(jax.jit(jax.vmap(one))(given))


def profile_in_memory(params, x, config, *, measures=("residual_ratio",), **inputs):
    """The profile of a network's states, of its full trace: what `ProfilePass` streams."""
    trace = rc.apply(params, x, config, **inputs)
    return rc.profile(trace, measures=measures, mask=inputs.get("mask"))


def heads_in_memory(params, x, config, **inputs):
    """What `measure_heads` streams, of a full trace."""
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
