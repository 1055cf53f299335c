"""Looped networks: the same layers applied again and again, and how their states change.

    config = rc.transformer(depth=64, num_heads=4, d_model=64, layer_map=(0,) * 64)
    report = rc.loop_report(rc.init(key, config), x, config)

With tied weights a loop adds the same direction each time: N loops with a gain of 1/√N let the
states grow by √N, where N different layers would not (Wang et al. 2026).

Axis letters: r loops, k path lengths, n tokens, d width.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike
from rank_collapse.measures.residuals import residual_ratio, token_cosine
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import apply
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.theory.transverse import transverse_growth


class LoopReport(NamedTuple):
    """What `loop_report` measured, X_r the state after r loops.

    Attributes:
        rms: [r + 1], root of the mean square of X_r.
        fixed_point: [r], ‖X_{r+1} − X_r‖_F/‖X_r‖_F: 0 at a fixed point of the loop.
        token_cosine, residual_ratio: [r + 1], of X_r.
        transverse: [r], log10 of the factor by which a loop stretches differences between nearly
            equal tokens.
        path_size: [r + 1, k], ‖C_k‖_F of the sum over all paths through k heads, k = 0 .. depth.
    """

    rms: Float[Array, "r"]
    fixed_point: Float[Array, "r"]
    token_cosine: Float[Array, "r"]
    residual_ratio: Float[Array, "r"]
    transverse: Float[Array, "r"]
    path_size: Float[Array, "r k"]


@dataclasses.dataclass(frozen=True)
class _SizePass(LengthPass):
    """‖C_k‖_F after every layer, of the tokens that exist."""

    def measure_layer(self, layer, x, layer_values, carry):
        """Carry the channels through the layer, and measure their sizes."""
        channels = self.carry_channels(layer, layer_values, carry)
        return channels, _frobenius_norm(channels.start[:, 0], layer.inputs.existing_tokens)

    def build_result(self, walk_result):
        """Join the sizes of X^0 and of all layers: [L + 1, L + 1]."""
        start = self.init_carry(walk_result.prepared, walk_result.config).start[:, 0]
        return jnp.concatenate(
            [
                _frobenius_norm(start, walk_result.prepared.existing_tokens)[None],
                walk_result.layer_results,
            ]
        )


@full_precision
def loop_report(
    params: TransformerParams, x: ArrayLike, config: TransformerConfig, **inputs: ArrayLike | None
) -> LoopReport:
    """Measure a looped network on one example, loop by loop.

    Args:
        params, x: See `rc.apply`.
        config: A configuration whose `layer_map` repeats its layers: (0, 1, 0, 1, ...).
        **inputs: mask, bias, segments and positions of `rc.apply`. Only a mask [n] leaves tokens
            out of the measures; a mask of more axes restricts attention alone.

    Raises:
        ValueError: A network that is not looped, or that `rc.transverse_exponents` does not accept.

    Source: Wang et al. 2026 (arXiv 2606.18524) for the growth.
    """
    rows = config.num_rows
    looped_map = tuple(range(rows)) * (config.depth // rows)
    if config.layer_map != looped_map:
        raise ValueError(
            f"layer_map={config.layer_map} of depth={config.depth} must contain all rows from 0 to "
            f"{rows - 1} in order, once for each loop; {tuple(range(rows)) * 2} has two loops of "
            f"depth={2 * rows}"
        )
    states = apply(params, x, config, **inputs).hidden[::rows]
    mask = inputs.get("mask")
    # A mask [n] says which tokens exist. A mask [n, n] says who attends to whom: all tokens exist,
    # and the measures of states count all of them.
    mask = None if mask is None or jnp.ndim(mask) > 1 else mask
    exists = jnp.ones(states.shape[1]) if mask is None else jnp.asarray(mask, states.dtype)
    change = _frobenius_norm(jnp.diff(states, axis=0), exists)
    growth = transverse_growth(params, x, config, **inputs)[:, 0]
    params, prepared = prepare_inputs(params, x, config, covers=LengthPass.covers, **inputs)
    path_sizes = run_pass(_SizePass(), params, prepared, config)
    size = _frobenius_norm(states, exists)
    return LoopReport(
        rms=size / jnp.sqrt(jnp.sum(exists) * config.d_model),
        fixed_point=change / size[:-1],
        token_cosine=token_cosine(states, mask=mask),
        residual_ratio=residual_ratio(states, mask=mask),
        transverse=jnp.sum(growth.reshape(-1, rows), axis=1),
        path_size=path_sizes[::rows],
    )


def _frobenius_norm(states, exists):
    """Compute ‖X‖_F of every state [k, n, d] over the tokens that exist."""
    return jnp.sqrt(jnp.sum(jnp.square(states) * exists[None, :, None], axis=(1, 2)))
