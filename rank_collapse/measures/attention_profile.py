"""What attention looks at, head by head and layer by layer.

Axis letters: l layers, h heads, n queries, m keys.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from rank_collapse.measures.attention_entropy import attention_entropy
from rank_collapse.measures.saturation import largest_weight
from rank_collapse.measures.sinks import first_column, largest_column
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import Each, run
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import Forward
from rank_collapse.network.walk import Layer


@full_precision
def attention_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, *, mask: Any = None, **inputs: Any
) -> dict[str, Float[Array, "l h"]]:
    """Measures of every head's attention weights, means over the queries that exist.

    entropy          −Σ_j P_ij log P_ij in nats
    largest_weight   max_j P_ij
    largest_column   max_j mean_i P_ij, the most looked at key
    first_column     mean_i P_i1, the attention sink (Xiao et al. 2024); of the first token that
                     exists

    Args:
        params, x, config: As in `rank_collapse.apply`.
        mask: Bool [n], the tokens that exist.
        **inputs: Other arguments of `apply`.
    """
    params, entry = enter(params, x, config, mask=mask, **inputs)
    return _attention_profile(params, entry, config)


@jax.jit
def _attention_profile(params, entry, config):
    return run(Each(attention_measures), params, entry, config)


def attention_measures(layer: Layer, x: Any, seen: Forward) -> dict[str, Float[Array, "h"]]:
    """The measures of one layer's heads: a measure of `passes.Each`."""
    weights, mask = seen.trace.attention, layer.inputs.token_mask
    return {
        "entropy": attention_entropy(weights, mask=mask),
        "largest_weight": largest_weight(weights, mask=mask),
        "largest_column": largest_column(weights, mask=mask),
        "first_column": first_column(weights, mask=mask, key_mask=mask),
    }
