"""How far tokens are from rank one: norms, residuals, ranks, profiles by layer."""

from rank_collapse.measures.attention_entropy import attention_entropy
from rank_collapse.measures.centers import CENTERS, CompositeCenter, center_token, composite_center
from rank_collapse.measures.monitor import monitor, participation_ratio
from rank_collapse.measures.norms import NORMS, composite_norm, matrix_norm, singular_values
from rank_collapse.measures.profiles import (
    MEASURES,
    batch_profiles,
    measure_batch,
    network_profile,
    profile,
    residual_profile,
)
from rank_collapse.measures.residuals import (
    best_rank_one_residual,
    effective_rank,
    rank_at,
    rank_one_ratio,
    residual,
    residual_ratio,
    stable_rank,
    token_cosine,
)
from rank_collapse.measures.saturation import largest_weight, saturated_share
from rank_collapse.measures.sinks import column_means, first_column, largest_column, sink_rate

__all__ = [
    "CENTERS",
    "MEASURES",
    "NORMS",
    "CompositeCenter",
    "attention_entropy",
    "batch_profiles",
    "best_rank_one_residual",
    "center_token",
    "column_means",
    "composite_center",
    "composite_norm",
    "effective_rank",
    "first_column",
    "largest_column",
    "largest_weight",
    "matrix_norm",
    "measure_batch",
    "monitor",
    "network_profile",
    "participation_ratio",
    "profile",
    "rank_at",
    "rank_one_ratio",
    "residual",
    "residual_profile",
    "residual_ratio",
    "saturated_share",
    "singular_values",
    "sink_rate",
    "stable_rank",
    "token_cosine",
]
