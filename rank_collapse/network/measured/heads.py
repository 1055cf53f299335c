"""Measures of every head's attention weights, layer by layer."""

from typing import Any

from jaxtyping import Array, Float

from rank_collapse.measures.attention import (
    attention_entropy,
    first_column,
    largest_column,
    largest_weight,
)
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerMeasure, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import Layer, LayerValues


@full_precision
def attention_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> dict[str, Float[Array, "l h"]]:
    """Measure every head's attention weights, means over the queries that exist.

    entropy          −Σ_j P_ij log P_ij in nats
    largest_weight   max_j P_ij
    largest_column   max_j mean_i P_ij, the key that gets most attention
    first_column     mean_i P_i1, the attention sink (Xiao et al. 2024); of the first token that
                     exists

    Args:
        params, x, config, **inputs: As in `rc.apply`; a mask [n] says which tokens exist.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run_pass(LayerMeasure(measure_heads), params, prepared, config)


def measure_heads(layer: Layer, x: Any, layer_values: LayerValues) -> dict[str, Float[Array, "h"]]:
    """Measure one layer's heads, as a measure of `passes.LayerMeasure`.

    Args:
        layer: The layer.
        x: Its input, which is not read.
        layer_values: What it computed.
    """
    weights, mask = layer_values.trace.attention, layer.inputs.token_mask
    return {
        "entropy": attention_entropy(weights, mask=mask),
        "largest_weight": largest_weight(weights, mask=mask),
        "largest_column": largest_column(weights, mask=mask),
        "first_column": first_column(weights, mask=mask, key_mask=mask),
    }
