"""Names of `rank_collapse.paths`."""

from .contributions import (
    PathContributions as PathContributions,
    path_contributions as path_contributions,
)
from .direct import (
    DirectContributions as DirectContributions,
    direct_contributions as direct_contributions,
    logit_attribution as logit_attribution,
)
from .enumeration import count_paths as count_paths
from .function_recording import record_function as record_function
from .functions import function_contributions as function_contributions
from .heads import head_contributions as head_contributions
from .lengths import (
    BranchShares as BranchShares,
    branch_shares as branch_shares,
    path_length_law as path_length_law,
    rollout as rollout,
)
from .loops import LoopReport as LoopReport, loop_report as loop_report
from .sets import (
    Classifier as Classifier,
    path_set_logits as path_set_logits,
    path_set_states as path_set_states,
    path_state as path_state,
    sample_path as sample_path,
    sample_path_sets as sample_path_sets,
)
from .sharing import (
    coalition_values as coalition_values,
    covariance_shares as covariance_shares,
    shapley_values as shapley_values,
)
from .transport import (
    Transport as Transport,
    name_states as name_states,
    transport as transport,
    transport_ranks as transport_ranks,
)
from .truncation import truncated as truncated
