"""What theory says of a network: residuals in logarithms, bounds, and the rates of collapse."""

from rank_collapse.theory.cubic_law import (
    RateConstant,
    closed_constant,
    cubic_profile,
    measured_constant,
    theorem_constant,
)
from rank_collapse.theory.logdomain import LogTrace, local_rate, log_residual_profile, log_trace
from rank_collapse.theory.reports import BoundReport, bound_report
from rank_collapse.theory.score_variance import ScoreVariance, score_variance
from rank_collapse.theory.stability import (
    collapse_law,
    expected_gradient_norms,
    expected_pass,
    update_sizes,
)
from rank_collapse.theory.transverse import transverse_exponents, transverse_growth

__all__ = [
    "BoundReport",
    "LogTrace",
    "RateConstant",
    "ScoreVariance",
    "bound_report",
    "closed_constant",
    "collapse_law",
    "cubic_profile",
    "expected_gradient_norms",
    "expected_pass",
    "local_rate",
    "log_residual_profile",
    "log_trace",
    "measured_constant",
    "score_variance",
    "theorem_constant",
    "transverse_exponents",
    "transverse_growth",
    "update_sizes",
]
