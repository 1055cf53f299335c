"""Self-consistent truncation: what a network computes when paths longer than K do not exist.

Frozen sums keep the attention, norm statistics and gates that the whole network had, its long paths
included. Here every sublayer takes them from the state that paths of length at most K make, so that
nothing of the longer ones is left.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.network import attention as attn
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter
from rank_collapse.network.gains import layer_gains
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.sublayer import sites_of, sublayer
from rank_collapse.network.transformer import scan_layers
from rank_collapse.paths import frozen
from rank_collapse.paths.channels import Channels, channel_sum
from rank_collapse.paths.contributions import PathContributions


@full_precision
def truncated(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    length: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> PathContributions:
    """The network with paths of length at most K, attention, norms and gates recomputed from them.

    With X = Σ_{k≤K} C_k + offset the state of every sublayer, P_h, 1/σ and the gates come from X:
        C_k ← λ C_k + γ Σ_h P_h(X) C_{k−1} W_h  for k ≤ K;  what would become longer is dropped.
    K = L is the whole network, K = 0 the network whose heads pass on their biases alone. Short
    paths suffice where this is near the whole network's output for a small K.

    Args:
        params, x, config, mask, bias, segments, positions: As in `apply`.
        length: K, or several [k]; may be traced.

    Returns:
        `PathContributions` with by_length [L + 1, n, d], 0 beyond K, the offset and their sum as
        the output; with a leading axis [k] for several lengths. Memory O(L n d) for each.

    Raises:
        ValueError: As `apply`; a length outside 0..L; cross-attention.
    """
    length = jnp.asarray(length)
    if config.cross_attention:
        raise ValueError("truncated does not cover cross_attention=True; see path_contributions")
    if length.ndim > 1 or not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(f"length of shape {length.shape} and dtype {length.dtype} is no K or [k]")
    if not isinstance(length, jax.core.Tracer):
        given = np.atleast_1d(length)
        wrong = given[(given < 0) | (given > config.depth)]
        if wrong.size:
            raise ValueError(f"length={wrong[0]} is not in 0..{config.depth}")
    params, entry = enter(
        params, x, config, mask=mask, bias=bias, segments=segments, positions=positions
    )
    return _truncated(params, entry, config, length)


@jax.jit
def _truncated(params, entry, config, length):
    if length.ndim:
        return jax.vmap(functools.partial(_truncated, params, entry, config))(length)
    keep = (jnp.arange(config.depth + 1) <= length)[:, None, None, None]
    score = {"score": config.score, "scale": config.scale_scores, "norm_eps": config.norm_eps}

    def norm(site, state):
        scale = frozen.frozen_scale(_total(state), config)
        return state.map(lambda c, ones: frozen.frozen_norm(site.norm, scale, c, ones, config))

    def body(state, step):
        layer, gains = step
        sites, start = sites_of(layer, config, gains), state
        context = entry.context.of_layer(gains.window)

        def attention(seen):
            x = _total(seen)
            weights = attn.attention_weights(
                layer.attention, x, x, context=context, temperature=gains.temperature, **score
            )
            part = seen.map(
                lambda c, ones: frozen.frozen_attention(layer.attention, weights, c, ones), -1
            ).shift(0)
            return part.replace(start=jnp.where(keep, part.start, 0)), None

        def mlp(seen):
            gate = frozen.mlp_gate(layer.mlp, _total(seen), config.mlp, config.routing)
            return seen.map(lambda c, ones: frozen.frozen_mlp(layer.mlp, gate, c, ones)), None

        state, _ = sublayer(sites.attention, state, attention, norm, channel_sum)
        if config.mlp != "none":
            state, _ = sublayer(sites.mlp, state, mlp, norm, channel_sum, start)
        return state, None

    zeros = jnp.zeros_like(entry.x)
    start = jnp.concatenate([entry.x[None], jnp.broadcast_to(zeros, (config.depth, *zeros.shape))])
    state = Channels(start=start[:, None], memory=None, offset=zeros)
    gains = layer_gains(config, entry.x.dtype, params)
    state, _ = scan_layers(body, state, params, config, gains)
    if config.final_norm:
        scale, last = frozen.frozen_scale(_total(state), config), params.final_norm
        state = state.map(lambda c, ones: frozen.frozen_norm(last, scale, c, ones, config))
    return PathContributions(by_length=state.start[:, 0], offset=state.offset, output=_total(state))


def _total(state):
    """The tokens that the channels sum to."""
    return state.start.sum(axis=(0, 1)) + state.offset
