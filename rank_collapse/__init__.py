"""Rank collapse in attention networks, in JAX.

Axis letters, used in annotations and einsum strings alike:
n tokens (queries), m keys, d model width, f MLP width, h heads, k per-head query/key width,
v per-head value width, l layers, s seeds, b batch, p paths, c classes.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from rank_collapse.extras import MissingPackage
from rank_collapse.measures.attention import (
    attention_entropy as attention_entropy,
    attention_profile as attention_profile,
    attention_rows as attention_rows,
    first_column as first_column,
    largest_column as largest_column,
    largest_logit as largest_logit,
    largest_weight as largest_weight,
    saturated_share as saturated_share,
    sink_rate as sink_rate,
)
from rank_collapse.measures.coord_check import (
    CoordCheck as CoordCheck,
    coord_check as coord_check,
)
from rank_collapse.measures.influence import (
    effective_depth as effective_depth,
    layer_influence as layer_influence,
    layer_removal as layer_removal,
)
from rank_collapse.measures.monitor import (
    monitor as monitor,
    monitor_gradients as monitor_gradients,
    monitored as monitored,
)
from rank_collapse.measures.norms import (
    composite_norm as composite_norm,
    matrix_norm as matrix_norm,
)
from rank_collapse.measures.profiles import (
    Profile as Profile,
    network_profile as network_profile,
    profile as profile,
)
from rank_collapse.measures.residuals import (
    effective_rank as effective_rank,
    effective_rank_share as effective_rank_share,
    matrix_entropy as matrix_entropy,
    participation_ratio as participation_ratio,
    rank_one_ratio as rank_one_ratio,
    residual as residual,
    residual_ratio as residual_ratio,
    stable_rank as stable_rank,
    stable_rank_bound as stable_rank_bound,
    stream_homogenisation as stream_homogenisation,
    token_cosine as token_cosine,
)
from rank_collapse.measures.spikes import (
    residual_spike as residual_spike,
    spike_entry as spike_entry,
    spike_feature as spike_feature,
    spike_norm as spike_norm,
    spike_share as spike_share,
    spike_token as spike_token,
)
from rank_collapse.measures.table import MEASURES as MEASURES, Measure as Measure
from rank_collapse.measures.updates import (
    gradient_norms as gradient_norms,
    output_change as output_change,
    update_ranks as update_ranks,
)
from rank_collapse.network import encoder_decoder as encoder_decoder, surgery as surgery
from rank_collapse.network.admin import admin_profile as admin_profile
from rank_collapse.network.attention import (
    Mixing as Mixing,
    multi_head_attention as multi_head_attention,
)
from rank_collapse.network.config import (
    TransformerConfig as TransformerConfig,
    san as san,
    san_mlp as san_mlp,
    san_skip as san_skip,
    transformer as transformer,
)
from rank_collapse.network.decoding import Decoded as Decoded, greedy_decode as greedy_decode
from rank_collapse.network.designs import DESIGNS as DESIGNS, design as design
from rank_collapse.network.embedding import (
    EmbeddingConfig as EmbeddingConfig,
    EmbeddingParams as EmbeddingParams,
    embed as embed,
)
from rank_collapse.network.encoder_decoder import (
    EncoderDecoderConfig as EncoderDecoderConfig,
    EncoderDecoderParams as EncoderDecoderParams,
    EncoderDecoderTrace as EncoderDecoderTrace,
)
from rank_collapse.network.gains import Gains as Gains
from rank_collapse.network.layers import MLPParams as MLPParams, NormParams as NormParams
from rank_collapse.network.parameters import (
    BlockParams as BlockParams,
    TransformerParams as TransformerParams,
    init as init,
    layer_params as layer_params,
    stack_layers as stack_layers,
)
from rank_collapse.network.projections import AttentionParams as AttentionParams
from rank_collapse.network.transformer import (
    LayerTrace as LayerTrace,
    Trace as Trace,
    apply as apply,
    apply_batch as apply_batch,
)
from rank_collapse.network.variant_edits import (
    canon as canon,
    init_canon as init_canon,
    value_residual as value_residual,
)
from rank_collapse.network.variants import (
    VARIANTS as VARIANTS,
    init_variant as init_variant,
    variant as variant,
)
from rank_collapse.paths.contributions import (
    PathContributions as PathContributions,
    path_contributions as path_contributions,
)
from rank_collapse.paths.direct import (
    DirectContributions as DirectContributions,
    direct_contributions as direct_contributions,
    logit_attribution as logit_attribution,
)
from rank_collapse.paths.enumeration import (
    count_paths as count_paths,
    enumerate_paths as enumerate_paths,
    path_attention as path_attention,
)
from rank_collapse.paths.heads import head_contributions as head_contributions
from rank_collapse.paths.loops import LoopReport as LoopReport, loop_report as loop_report
from rank_collapse.paths.sets import (
    Classifier as Classifier,
    path_set_logits as path_set_logits,
    path_set_states as path_set_states,
    path_state as path_state,
    sample_path as sample_path,
    sample_path_sets as sample_path_sets,
)
from rank_collapse.paths.sharing import (
    coalition_values as coalition_values,
    covariance_shares as covariance_shares,
    shapley_values as shapley_values,
)
from rank_collapse.paths.truncation import truncated as truncated
from rank_collapse.theory.cubic_law import (
    closed_constant as closed_constant,
    measured_constant as measured_constant,
    theorem_constant as theorem_constant,
)
from rank_collapse.theory.logdomain import (
    local_rate as local_rate,
    log_residual_profile as log_residual_profile,
)
from rank_collapse.theory.reports import BoundReport as BoundReport, bound_report as bound_report
from rank_collapse.theory.stability import collapse_law as collapse_law
from rank_collapse.theory.transverse import transverse_exponents as transverse_exponents

if TYPE_CHECKING:
    from rank_collapse import (
        flax_adapters as flax_adapters,
        pretrained as pretrained,
        training as training,
    )
    from rank_collapse.pretrained.depth import depth_report as depth_report
    from rank_collapse.report.profiles import plot as plot
    from rank_collapse.theory.exact import exact_profile as exact_profile
    from rank_collapse.training.depth_rules import depth_rule as depth_rule

__version__ = "1.0.0"

# Found as rc.pretrained and so on; imported when first asked for, since they take their time or
# need an extra.
_LATER = {  # the module, the extra, and a package of it without which the name is not listed
    "depth_report": ("pretrained.depth", "pretrained", "jax"),
    "depth_rule": ("training.depth_rules", "training", "optax"),
    "exact_profile": ("theory.exact", "exact", "flint"),
    "flax_adapters": ("flax_adapters", "flax", "flax"),
    "plot": ("report.profiles", "report", "matplotlib"),
    "pretrained": ("pretrained", "pretrained", "jax"),
    "training": ("training", "training", "optax"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'rank_collapse' has no attribute {name!r}")
    path, extra, package = _LATER[name]
    try:
        importlib.import_module(package)  # what needs it may import it later
        module = importlib.import_module(f"rank_collapse.{path}")
    except ModuleNotFoundError as error:
        raise MissingPackage(f"rank_collapse.{name}", error, extra) from error
    return module if path == name else getattr(module, name)


# For help() and `import *`: what is imported here by name, and what can be imported later. Modules
# that an import put here beside it are not of it.
_OTHERS = {"MissingPackage", "TYPE_CHECKING", "Any"}
for _name, _value in dict(globals()).items():
    if sys.modules.get(_name) is _value or f"{__name__}.{_name}" in sys.modules:
        _OTHERS.add(_name)
__all__ = [name for name in globals() if name[0] != "_" and name not in _OTHERS]  # pyright: ignore
__all__ += [n for n, (*_, package) in _LATER.items() if importlib.util.find_spec(package)]  # pyright: ignore


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
