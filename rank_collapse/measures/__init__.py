"""How far tokens are from rank one: norms, residuals, ranks, profiles by layer."""

from rank_collapse.measures.attention import (
    attention_entropy,
    column_means,
    first_column,
    largest_column,
    largest_weight,
    saturated_share,
    sink_rate,
)
from rank_collapse.measures.centers import CENTERS, CompositeCenter, center_token, composite_center
from rank_collapse.measures.monitor import monitor
from rank_collapse.measures.norms import NORMS, composite_norm, matrix_norm, singular_values
from rank_collapse.measures.profiles import (
    measure_batch,
    network_profile,
    profile,
)
from rank_collapse.measures.residuals import (
    effective_rank,
    participation_ratio,
    rank_at,
    rank_one_ratio,
    residual,
    residual_ratio,
    stable_rank,
    stable_rank_bound,
    token_cosine,
)
from rank_collapse.measures.table import COLLAPSE, MEASURES, Measure

__all__ = [
    "CENTERS",
    "COLLAPSE",
    "MEASURES",
    "NORMS",
    "CompositeCenter",
    "Measure",
    "attention_entropy",
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
    "residual_ratio",
    "saturated_share",
    "singular_values",
    "sink_rate",
    "stable_rank",
    "stable_rank_bound",
    "token_cosine",
]
