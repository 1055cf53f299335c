"""Names of `rank_collapse`, each imported when it is first used."""

from . import (
    measures as measures,
    network as network,
    paths as paths,
    pretrained as pretrained,
    theory as theory,
    training as training,
)
from .agree.recording import record as record
from .measures.attention import (
    attention_entropy as attention_entropy,
    sink_rate as sink_rate,
)
from .measures.fused_attention import attention_rows as attention_rows
from .measures.listings import duplicates as duplicates, spikes as spikes
from .measures.monitor import monitor as monitor
from .measures.norms import composite_norm as composite_norm
from .measures.profiles import Profile as Profile, profile as profile
from .measures.residuals import (
    effective_rank as effective_rank,
    participation_ratio as participation_ratio,
    rank_one_ratio as rank_one_ratio,
    residual as residual,
    residual_ratio as residual_ratio,
    stable_rank as stable_rank,
    token_cosine as token_cosine,
)
from .measures.table import MEASURES as MEASURES
from .network import surgery as surgery
from .network.config import (
    TransformerConfig as TransformerConfig,
    san as san,
    san_mlp as san_mlp,
    san_skip as san_skip,
    transformer as transformer,
)
from .network.designs import design as design
from .network.embedding import EmbeddingConfig as EmbeddingConfig
from .network.measured.monitored import monitored as monitored
from .network.parameters import init as init
from .network.residual import Gains as Gains
from .network.trace import Trace as Trace
from .network.transformer import apply as apply
from .network.variants import variant as variant
from .paths.contributions import (
    PathContributions as PathContributions,
    path_contributions as path_contributions,
)
from .paths.direct import (
    direct_contributions as direct_contributions,
    logit_attribution as logit_attribution,
)
from .paths.enumeration import count_paths as count_paths
from .paths.function_recording import record_function as record_function
from .paths.functions import function_contributions as function_contributions
from .paths.heads import head_contributions as head_contributions
from .paths.lengths import (
    branch_shares as branch_shares,
    path_length_law as path_length_law,
    rollout as rollout,
)
from .paths.loops import loop_report as loop_report
from .paths.sharing import shapley_values as shapley_values
from .paths.truncation import truncated as truncated
from .pretrained.used_depth import depth_report as depth_report
from .report.profiles import plot as plot
from .scaling.coord_check import coord_check as coord_check
from .scaling.depth_rules import depth_rule as depth_rule
from .theory.expectation import collapse_law as collapse_law
from .theory.logdomain import local_rate as local_rate, log_residual_profile as log_residual_profile
from .theory.reports import BoundReport as BoundReport, bound_report as bound_report
from .theory.transverse import transverse_exponents as transverse_exponents
from .watch.gradients import monitor_gradients as monitor_gradients

__version__: str
