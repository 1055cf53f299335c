"""Measures of every head's attention weights, layer by layer."""

from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike
from rank_collapse.measures.attention import (
    attention_entropy,
    first_column,
    largest_column,
    largest_weight,
)
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer


def measure_heads(
    layer: Layer, x: ArrayLike, layer_values: LayerValues
) -> dict[str, Float[Array, "h"]]:
    """Measure one layer's heads, means over the queries that exist; for `passes.LayerMeasure`.

    entropy          −Σ_j P_ij log P_ij in nats
    largest_weight   max_j P_ij
    largest_column   max_j mean_i P_ij, the key that gets most attention
    first_column     mean_i P_i1, the attention sink (Xiao et al. 2024); of the first token that
                     exists

    Args:
        layer: The layer.
        x: Input of the layer, which is not read.
        layer_values: Values that the layer computed.
    """
    weights, mask = layer_values.trace.attention, layer.inputs.token_mask
    return {
        "entropy": attention_entropy(weights, mask=mask),
        "largest_weight": largest_weight(weights, mask=mask),
        "largest_column": largest_column(weights, mask=mask),
        "first_column": first_column(weights, mask=mask, key_mask=mask),
    }
