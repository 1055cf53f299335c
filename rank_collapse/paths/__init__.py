"""Paths through a network: counted, sampled, evaluated one by one, and all summed by length."""

from rank_collapse.paths.attribution import logit_attribution
from rank_collapse.paths.contributions import PathContributions, path_contributions
from rank_collapse.paths.direct import DirectContributions, direct_contributions
from rank_collapse.paths.enumeration import (
    ALL_HEADS,
    count_paths,
    enumerate_paths,
    path_attention,
    path_length,
    path_weight,
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
    read_out,
    sample_path,
    sample_path_sets,
)

__all__ = [
    "ALL_HEADS",
    "Classifier",
    "DirectContributions",
    "PathContributions",
    "batch_path_set_logits",
    "count_paths",
    "direct_contributions",
    "enumerate_paths",
    "head_contributions",
    "logit_attribution",
    "path_attention",
    "path_contributions",
    "path_length",
    "path_set_logits",
    "path_set_states",
    "path_state",
    "path_weight",
    "read_out",
    "sample_path",
    "sample_path_sets",
    "sum_over_paths",
    "theorem_offset",
]
