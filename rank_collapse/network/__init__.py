"""The one network: its parts, its configuration, its parameters, and `apply`."""

from rank_collapse.network.attention import AttentionContext, AttentionParams, multi_head_attention
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams, embed
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams, init, layer_params
from rank_collapse.network.transformer import LayerTrace, Trace, apply

__all__ = [
    "AttentionContext",
    "AttentionParams",
    "BlockParams",
    "EmbeddingConfig",
    "EmbeddingParams",
    "LayerTrace",
    "MLPParams",
    "NormParams",
    "Trace",
    "TransformerConfig",
    "TransformerParams",
    "apply",
    "embed",
    "init",
    "layer_params",
    "multi_head_attention",
]
