"""The table of all measures: name, function, input, cost, meaning and source.

`profile`, `monitor`, passes over a network's layers and the thresholds of alarms read it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from rank_collapse import checks
from rank_collapse.annotations import AnyArray
from rank_collapse.measures import attention, residuals, spikes

MeasureName = Literal[
    "residual_ratio",
    "rank_one_ratio",
    "token_cosine",
    "effective_rank",
    "effective_rank_share",
    "matrix_entropy",
    "stable_rank",
    "stable_rank_bound",
    "participation_ratio",
    "spike_entry",
    "spike_norm",
    "spike_share",
    "spike_token",
    "spike_feature",
    "residual_spike",
    "bulk_ratio",
    "attention_entropy",
    "largest_weight",
    "saturated_share",
    "largest_column",
    "first_column",
    "sink_rate",
    "largest_logit",
]


class Threshold(NamedTuple):
    """A bound that a metric should not cross.

    Attributes:
        name: The metric, such as "loss". It also stands for the metric of a part of a network, such
            as "decoder.loss".
        value: The bound.
        above: Whether a metric crosses the bound when it is above it; below it otherwise.
        meaning: What an alarm says about a metric that crosses the bound.
        finite: Whether NaN (null in a file) and infinity cross the bound, too.
    """

    name: str
    value: float
    above: bool = False
    meaning: str = ""
    finite: bool = False


@dataclasses.dataclass(frozen=True)
class Measure:
    """One measure, which can be called like its function.

    Attributes:
        of: The function measure(x, mask=...) of one array, which is pure.
        needs: "tokens", x [n, d]; "attention", weights x [..., n, m]; or "scores" before the
            softmax [..., n, m].
        cost: Operations, up to a factor; h heads.
        meaning: One line.
        source: Paper.
        alarm: The value from which the run should be checked; None for measures without an alarm.
    """

    of: Callable[..., Any]
    needs: str
    cost: str
    meaning: str
    source: str
    alarm: Threshold | None = None

    def __call__(self, x: AnyArray, **options: object) -> AnyArray:
        return self.of(x, **options)


# Thresholds are where the run should be checked, not where theory draws a line: tokens
# that differ by a hundredth of their size, or by an angle of 8 degrees; rows of attention on a
# single key.
MEASURES: dict[MeasureName, Measure] = {
    "residual_ratio": Measure(
        residuals.residual_ratio,
        "tokens",
        "n d",
        "‖res(X)‖/‖X‖ in ‖·‖_{1,∞}; 0 when all tokens are equal",
        "Dong et al. 2021",
        Threshold("residual_ratio", 0.01, meaning="rank collapse"),
    ),
    "rank_one_ratio": Measure(
        residuals.rank_one_ratio,
        "tokens",
        "n d min(n, d), by an SVD",
        "‖X − σ_1 u_1 v_1ᵀ‖/‖X‖; 0 when all tokens are multiples of one vector",
        "Eckart and Young 1936",
    ),
    "token_cosine": Measure(
        residuals.token_cosine,
        "tokens",
        "n d",
        "mean cosine of two tokens; 1 when all tokens have the same direction",
        "Gong et al. 2021",
        Threshold("token_cosine", 0.99, above=True, meaning="rank collapse"),
    ),
    "effective_rank": Measure(
        residuals.effective_rank,
        "tokens",
        "n d min(n, d), by singular values",
        "exponential of the entropy of the shares σ_i/Σ_j σ_j: how many directions the tokens "
        "use, at most the rank",
        "Roy and Vetterli 2007",
    ),
    "effective_rank_share": Measure(
        residuals.effective_rank_share,
        "tokens",
        "n d min(n, d), by singular values",
        "effective_rank of res(X) divided by its largest possible value, min(n − 1, d)",
        "Roy and Vetterli 2007",
    ),
    "matrix_entropy": Measure(
        residuals.matrix_entropy,
        "tokens",
        "n d min(n, d), by singular values",
        "entropy of the shares σ_i²/Σ_j σ_j² in nats, also called prompt entropy; 0 if the "
        "tokens use one direction",
        "Skean et al. 2025",
    ),
    "stable_rank": Measure(
        residuals.stable_rank,
        "tokens",
        "n d min(n, d), by singular values",
        "‖X‖_F²/σ_1²: how many directions, each as strong as the strongest one, would hold all of "
        "‖X‖_F²; at most the rank",
        "Rudelson and Vershynin 2007",
    ),
    "stable_rank_bound": Measure(
        residuals.stable_rank_bound,
        "tokens",
        "n d min(n, d), one product",
        "‖X‖_F²/σ², where σ is an estimate of σ_1 by 20 steps of power iteration; since σ ≤ σ_1, "
        "this is at least stable_rank",
        "Rudelson and Vershynin 2007",
    ),
    "participation_ratio": Measure(
        residuals.participation_ratio,
        "tokens",
        "n d min(n, d), one product",
        "tr(G)²/‖G‖_F² for G = XXᵀ: the number of directions that hold most of ‖X‖_F²",
        "Gao et al. 2017",
    ),
    "spike_entry": Measure(
        spikes.spike_entry,
        "tokens",
        "n d log(n d), a sort",
        "max|x_ij|/median|x_ij|: the largest entry divided by the median entry; large if there "
        "are massive activations",
        "Sun et al. 2024",
    ),
    "spike_norm": Measure(
        spikes.spike_norm,
        "tokens",
        "n d",
        "max ‖x_i‖/median ‖x_i‖: the largest norm of a token divided by the median norm",
        "Sun et al. 2024",
    ),
    "spike_share": Measure(
        spikes.spike_share,
        "tokens",
        "n d",
        "max ‖x_i‖²/‖X‖_F²: the largest squared norm of a token divided by the sum over all tokens",
        "Sun et al. 2024",
    ),
    "spike_token": Measure(
        spikes.spike_token,
        "tokens",
        "n d",
        "position i of the token with the largest |x_ij|",
        "Sun et al. 2024",
    ),
    "spike_feature": Measure(
        spikes.spike_feature,
        "tokens",
        "n d",
        "index j of the feature with the largest |x_ij|",
        "Sun et al. 2024",
    ),
    "residual_spike": Measure(
        spikes.residual_spike,
        "tokens",
        "n d",
        "the same quotient as spike_share, for res(X); above 1/2, one token decides "
        "residual_ratio, and `rc.profile` says so in its field `spiked`",
        "",
    ),
    "bulk_ratio": Measure(
        spikes.bulk_ratio,
        "tokens",
        "n d log(n), a sort of each feature",
        "residual_ratio of all tokens except those far from the median token (at most an eighth "
        "of the tokens)",
        "",
    ),
    "attention_entropy": Measure(
        attention.attention_entropy,
        "attention",
        "h n m",
        "mean over queries i of −Σ_j P_ij log P_ij in nats; log m if all weights are equal",
        "Zhai et al. 2023",
        Threshold("attention_entropy", 0.05, meaning="entropy collapse"),
    ),
    "largest_weight": Measure(
        attention.largest_weight,
        "attention",
        "h n m",
        "mean over queries i of the largest weight max_j P_ij; 1/m if all weights are equal",
        "",
    ),
    "saturated_share": Measure(
        attention.saturated_share,
        "attention",
        "h n m",
        "share of the queries i whose largest weight max_j P_ij is above 0.99",
        "",
    ),
    "largest_column": Measure(
        attention.largest_column,
        "attention",
        "h n m",
        "max_j mean_i P_ij: the mean weight, over queries, of the key with the largest mean weight",
        "Gu et al. 2025",
    ),
    "first_column": Measure(
        attention.first_column,
        "attention",
        "h n m",
        "mean over queries of the weight of the first key that exists",
        "Xiao et al. 2024",
    ),
    "sink_rate": Measure(
        attention.sink_rate,
        "attention",
        "h n m",
        "share of the heads in which first_column is above 0.3",
        "Gu et al. 2025",
    ),
    "largest_logit": Measure(
        attention.largest_logit,
        "scores",
        "h n m",
        "the largest score max_ij S_ij, before the softmax; the method QK-clip limits it",
        "Kimi Team 2025",
    ),
}

# What a run is watched for.
COLLAPSE = (
    *(measure.alarm for measure in MEASURES.values() if measure.alarm),
    Threshold("batch_residual_ratio", 0.001, meaning="collapse over the batch"),
    Threshold("attention_entropy_least", 0.05, meaning="entropy collapse of a head"),
    Threshold("loss", np.inf, above=True, meaning="divergence", finite=True),
)


def check_measure_names(measures: Any, needs: str = "tokens") -> tuple[str, ...]:
    """Return names of measures as a tuple, after a check.

    Args:
        measures: One name from `MEASURES`, or several.
        needs: The required input, "tokens", "attention" or "scores".

    Raises:
        ValueError: An unknown measure, or one that needs another input.
    """
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    choices = tuple(name for name, measure in MEASURES.items() if measure.needs == needs)
    for name in names:
        checks.check_choice(
            f"measure {name!r}", name, choices, f", which are the measures of {needs}"
        )
    return names
