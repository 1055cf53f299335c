"""Names of `rank_collapse.theory`."""

from .exact import exact_profile as exact_profile
from .expectation import collapse_law as collapse_law, expected_pass as expected_pass
from .logdomain import local_rate as local_rate, log_residual_profile as log_residual_profile
from .reports import BoundReport as BoundReport, bound_report as bound_report
from .transverse import transverse_exponents as transverse_exponents
