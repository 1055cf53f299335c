"""What theory says of a network: residuals in logarithms, and the convergence bounds."""

from rank_collapse.theory.bounds import BoundReport, bound_report
from rank_collapse.theory.logdomain import LogTrace, local_rate, log_residual_profile, log_trace

__all__ = [
    "BoundReport",
    "LogTrace",
    "bound_report",
    "local_rate",
    "log_residual_profile",
    "log_trace",
]
