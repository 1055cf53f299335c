"""Rank collapse in attention networks, in JAX.

Axis letters, used in annotations and einsum strings alike:
n tokens (queries), m keys, d model width, f MLP width, h heads, k per-head query/key width,
v per-head value width, l layers, s seeds, b batch, p paths, c classes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rank_collapse.measures.attention import (
    attention_entropy,
    attention_profile,
    column_means,
    first_column,
    largest_column,
    largest_weight,
    saturated_share,
    sink_rate,
)
from rank_collapse.measures.influence import layer_influence, layer_removal
from rank_collapse.measures.monitor import monitor, monitor_gradients
from rank_collapse.measures.monitored import monitored
from rank_collapse.measures.norms import matrix_norm
from rank_collapse.measures.profiles import measure_batch, network_profile, profile
from rank_collapse.measures.residuals import (
    composite_norm,
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
from rank_collapse.measures.table import MEASURES, Measure
from rank_collapse.measures.updates import gradient_norms, output_change
from rank_collapse.network import encoder_decoder, surgery
from rank_collapse.network.admin import admin_profile
from rank_collapse.network.attention import AttentionParams, Mixing, multi_head_attention
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.decoding import Decoded, greedy_decode
from rank_collapse.network.designs import DESIGNS, design
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams, embed
from rank_collapse.network.encoder_decoder import (
    EncoderDecoderConfig,
    EncoderDecoderParams,
    EncoderDecoderTrace,
)
from rank_collapse.network.fold import fold_gains
from rank_collapse.network.gains import Gains
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import (
    BlockParams,
    TransformerParams,
    init,
    layer_params,
    stack_layers,
)
from rank_collapse.network.presets import san, san_mlp, san_skip, transformer
from rank_collapse.network.transformer import LayerTrace, Trace, apply, apply_batch
from rank_collapse.paths.attribution import logit_attribution
from rank_collapse.paths.contributions import PathContributions, path_contributions
from rank_collapse.paths.direct import DirectContributions, direct_contributions
from rank_collapse.paths.enumeration import (
    count_paths,
    enumerate_paths,
    path_attention,
    sum_over_paths,
    theorem_offset,
)
from rank_collapse.paths.heads import head_contributions
from rank_collapse.paths.sets import (
    Classifier,
    batch_path_set_logits,
    path_set_logits,
    path_set_states,
    path_state,
    sample_path,
    sample_path_sets,
)
from rank_collapse.paths.sharing import coalition_values, covariance_shares, shapley_values
from rank_collapse.paths.truncation import truncated
from rank_collapse.theory.cubic_law import closed_constant, measured_constant, theorem_constant
from rank_collapse.theory.logdomain import local_rate, log_residual_profile
from rank_collapse.theory.reports import BoundReport, bound_report
from rank_collapse.theory.stability import collapse_law
from rank_collapse.theory.transverse import transverse_exponents

if TYPE_CHECKING:
    from rank_collapse import flax_adapters as flax_adapters
    from rank_collapse import pretrained as pretrained
    from rank_collapse import training as training
    from rank_collapse.theory.exact import exact_profile as exact_profile

__all__ = [
    "DESIGNS",
    "MEASURES",
    "AttentionParams",
    "BlockParams",
    "BoundReport",
    "Classifier",
    "Decoded",
    "DirectContributions",
    "EmbeddingConfig",
    "EmbeddingParams",
    "EncoderDecoderConfig",
    "EncoderDecoderParams",
    "EncoderDecoderTrace",
    "Gains",
    "LayerTrace",
    "MLPParams",
    "Measure",
    "Mixing",
    "NormParams",
    "PathContributions",
    "Trace",
    "TransformerConfig",
    "TransformerParams",
    "admin_profile",
    "apply",
    "apply_batch",
    "attention_entropy",
    "attention_profile",
    "batch_path_set_logits",
    "bound_report",
    "closed_constant",
    "coalition_values",
    "collapse_law",
    "column_means",
    "composite_norm",
    "count_paths",
    "covariance_shares",
    "design",
    "direct_contributions",
    "effective_rank",
    "embed",
    "encoder_decoder",
    "enumerate_paths",
    "first_column",
    "fold_gains",
    "gradient_norms",
    "greedy_decode",
    "head_contributions",
    "init",
    "largest_column",
    "largest_weight",
    "layer_influence",
    "layer_params",
    "layer_removal",
    "local_rate",
    "log_residual_profile",
    "logit_attribution",
    "matrix_norm",
    "measure_batch",
    "measured_constant",
    "monitor",
    "monitor_gradients",
    "monitored",
    "multi_head_attention",
    "network_profile",
    "output_change",
    "participation_ratio",
    "path_attention",
    "path_contributions",
    "path_set_logits",
    "path_set_states",
    "path_state",
    "profile",
    "rank_at",
    "rank_one_ratio",
    "residual",
    "residual_ratio",
    "sample_path",
    "sample_path_sets",
    "san",
    "san_mlp",
    "san_skip",
    "saturated_share",
    "shapley_values",
    "sink_rate",
    "stable_rank",
    "stable_rank_bound",
    "stack_layers",
    "sum_over_paths",
    "surgery",
    "theorem_constant",
    "theorem_offset",
    "token_cosine",
    "transformer",
    "transverse_exponents",
    "truncated",
]

__version__ = "0.1.0"

# Found as rc.pretrained and so on; imported when first asked for, since they take their time or
# need an extra.
_LATER = {
    "exact_profile": "theory.exact", "flax_adapters": "flax_adapters", "pretrained": "pretrained",
    "training": "training",
}  # fmt: skip
_EXTRAS = {"exact_profile": "exact", "flax_adapters": "flax", "training": "training"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'rank_collapse' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"rank_collapse.{_LATER[name]}")
    except ModuleNotFoundError as error:  # an attribute that is not there, for hasattr and help
        hint = f"{error}; pip install 'rank-collapse[{_EXTRAS.get(name, name)}]'"
        raise AttributeError(hint, name=name) from error
    return module.exact_profile if name == "exact_profile" else module


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
