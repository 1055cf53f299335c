"""Rank collapse in attention networks, in JAX.

Axis letters, used in annotations and einsum strings alike:
n tokens (queries), m keys, d model width, f MLP width, h heads, k per-head query/key width,
v per-head value width, l layers, s seeds, b batch, p paths, c classes.
"""

from rank_collapse.attention import AttentionParams, multi_head_attention
from rank_collapse.config import TransformerConfig, san, san_mlp, san_skip, transformer
from rank_collapse.embedding import EmbeddingConfig, EmbeddingParams, embed
from rank_collapse.layers import MLPParams, NormParams
from rank_collapse.network import (
    BlockParams,
    Trace,
    TransformerParams,
    apply,
    init,
    layer_params,
)
from rank_collapse.residuals import (
    composite_norm,
    effective_rank,
    residual,
    residual_ratio,
    stable_rank,
    token_cosine,
)

__all__ = [
    "AttentionParams",
    "BlockParams",
    "EmbeddingConfig",
    "EmbeddingParams",
    "MLPParams",
    "NormParams",
    "Trace",
    "TransformerConfig",
    "TransformerParams",
    "apply",
    "composite_norm",
    "effective_rank",
    "embed",
    "init",
    "layer_params",
    "multi_head_attention",
    "residual",
    "residual_ratio",
    "san",
    "san_mlp",
    "san_skip",
    "stable_rank",
    "token_cosine",
    "transformer",
]
