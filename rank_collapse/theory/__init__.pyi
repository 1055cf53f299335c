"""Names of `rank_collapse.theory`."""

from .cubic_law import (
    closed_constant as closed_constant,
    measured_constant as measured_constant,
    theorem_constant as theorem_constant,
)
from .exact import exact_profile as exact_profile
from .logdomain import local_rate as local_rate, log_residual_profile as log_residual_profile
from .reports import BoundReport as BoundReport, bound_report as bound_report
from .stability import collapse_law as collapse_law
from .transverse import transverse_exponents as transverse_exponents
