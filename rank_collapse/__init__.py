"""Rank collapse in attention networks, in JAX.

Axis letters, used in annotations and einsum strings alike:
n tokens (queries), m keys, d model width, f MLP width, h heads, k per-head query/key width,
v per-head value width, l layers, s seeds, b batch, p paths, c classes.
"""

from rank_collapse.measures.residuals import (
    composite_norm,
    effective_rank,
    residual,
    residual_ratio,
    stable_rank,
    token_cosine,
)
from rank_collapse.network import surgery
from rank_collapse.network.attention import AttentionParams, multi_head_attention
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams, embed
from rank_collapse.network.gains import Gains
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams, init, layer_params
from rank_collapse.network.presets import san, san_mlp, san_skip, transformer
from rank_collapse.network.transformer import Trace, apply
from rank_collapse.paths.contributions import (
    PathContributions,
    head_contributions,
    path_contributions,
)
from rank_collapse.paths.enumeration import count_paths, enumerate_paths, sum_over_paths
from rank_collapse.paths.sets import (
    Classifier,
    batch_path_set_logits,
    path_set_logits,
    path_set_states,
    path_state,
    sample_path,
    sample_path_sets,
)
from rank_collapse.theory.bounds import BoundReport, bound_report
from rank_collapse.theory.logdomain import local_rate, log_residual_profile

__all__ = [
    "AttentionParams",
    "BlockParams",
    "BoundReport",
    "Classifier",
    "EmbeddingConfig",
    "EmbeddingParams",
    "Gains",
    "MLPParams",
    "NormParams",
    "PathContributions",
    "Trace",
    "TransformerConfig",
    "TransformerParams",
    "apply",
    "batch_path_set_logits",
    "bound_report",
    "composite_norm",
    "count_paths",
    "effective_rank",
    "embed",
    "enumerate_paths",
    "head_contributions",
    "init",
    "layer_params",
    "local_rate",
    "log_residual_profile",
    "multi_head_attention",
    "path_contributions",
    "path_set_logits",
    "path_set_states",
    "path_state",
    "residual",
    "residual_ratio",
    "sample_path",
    "sample_path_sets",
    "san",
    "san_mlp",
    "san_skip",
    "stable_rank",
    "sum_over_paths",
    "surgery",
    "token_cosine",
    "transformer",
]
