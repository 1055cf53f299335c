"""Variants that are edits of what attention computes: `apply(..., edit=...)`.

    trace = rc.apply(params, x, config, edit=rc.network.value_residual(params, x, config))

Axis letters: h heads, n tokens, v width of values, d width, l layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.edits import check_names, places
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import apply

Edits = dict[str, Callable[..., Any]]


def value_residual(
    params: TransformerParams, x: Any, config: TransformerConfig, share: Any = 0.5, **inputs: Any
) -> Edits:
    """The edit V_l ← (1 − s) V_l + s V_1 of every layer but the first, on one example.

    Sums over paths count s V_1 as a constant, which joins their offset.

    Args:
        params, x, config, **inputs: As in `apply`.
        share: s; a number or [L], may be traced.

    Source: Zhou et al. 2024 (arXiv 2410.17897).
    """
    first, shares = _first_values(params, x, config, share, inputs)
    return {"v": lambda v, layer: (1 - shares[layer]) * v + shares[layer] * first}


def _first_values(params, x, config, share, inputs):
    """(V_1 [h, n, v], s of each layer [L], 0 in the first)."""
    first = apply(params, x, config, keep=("v",), **inputs).kept["v"][0]
    return first, jnp.broadcast_to(jnp.asarray(share, first.dtype), (config.depth,)).at[0].set(0)


def init_canon(
    key: Any,
    config: TransformerConfig,
    names: Sequence[str] = ("attention_input", "mlp_input"),
    width: int = 4,
) -> dict[str, Any]:
    """Weights of `canon` at some places, uniform in ±1/√width as PyTorch starts such convolutions.

    Args:
        key: Random key.
        config: The network.
        names: Places of an edit. Canon-A is "attention_input" and Canon-C "mlp_input", what a
            branch reads after its norm; Canon-B, "q", "k", "v", is here after rotary positions.
        width: Tokens under the convolution, the last of them its own.

    Returns:
        {name: [L, width, ...]}, the last axes those of the place but its tokens.

    Raises:
        ValueError: A place that the network does not have.
    """
    check_names(tuple(names), config)
    weights = {}
    for name, own in zip(names, jax.random.split(key, len(names)), strict=True):
        *leading, _, features = places(config)[name]
        shape = (config.depth, width, *leading, features)
        weights[name] = jax.random.uniform(own, shape, minval=-1, maxval=1) / math.sqrt(width)
    return weights


def canon(weights: Mapping[str, Any]) -> Edits:
    """The edit h_t ← h_t + Σ_i w_i ∘ h_{t−i}: a causal convolution of each feature by itself.

    The tokens before are those of the array: cut padding on the left off.

    Args:
        weights: {place: [L, width, ...]} as `init_canon` draws them; w_0 is of the token itself.
            They may be traced, for a gradient.

    Source: Allen-Zhu 2025 (arXiv 2512.17351), Canon layers with a residual and without a bias.
    """

    def convolved(w):
        def edit(h, layer):
            rows = w[layer].astype(h.dtype)[..., None, :]  # [width, ..., 1, features]
            zeros, n = jnp.zeros_like(h), h.shape[-2]
            padded = jnp.concatenate([zeros, h], axis=-2)
            shifted = (padded[..., n - i : 2 * n - i, :] for i in range(min(len(rows), n)))
            return h + sum(row * own for row, own in zip(rows, shifted, strict=False))

        return edit

    return {name: convolved(jnp.asarray(w)) for name, w in weights.items()}
