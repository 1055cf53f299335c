"""Names of `rank_collapse.measures`."""

from .attention import (
    attention_entropy as attention_entropy,
    first_column as first_column,
    largest_column as largest_column,
    largest_logit as largest_logit,
    largest_weight as largest_weight,
    saturated_share as saturated_share,
    sink_rate as sink_rate,
)
from .fused_attention import attention_rows as attention_rows
from .monitor import monitor as monitor
from .norms import composite_norm as composite_norm, matrix_norm as matrix_norm
from .profiles import Profile as Profile, profile as profile
from .residuals import (
    effective_rank as effective_rank,
    effective_rank_share as effective_rank_share,
    matrix_entropy as matrix_entropy,
    participation_ratio as participation_ratio,
    rank_one_ratio as rank_one_ratio,
    residual as residual,
    residual_ratio as residual_ratio,
    stable_rank as stable_rank,
    stable_rank_bound as stable_rank_bound,
    token_cosine as token_cosine,
)
from .spikes import (
    bulk_ratio as bulk_ratio,
    residual_spike as residual_spike,
    spike_entry as spike_entry,
    spike_feature as spike_feature,
    spike_norm as spike_norm,
    spike_share as spike_share,
    spike_token as spike_token,
)
from .table import MEASURES as MEASURES, Measure as Measure, Threshold as Threshold
