"""Claims and their verdicts, figures from plain arrays, and the page that shows them."""

from rank_collapse.report.claims import Claim as Claim
from rank_collapse.report.page import (
    Comparison as Comparison,
    Section as Section,
    claim_line as claim_line,
    comparison_line as comparison_line,
    count_line as count_line,
    number as number,
    render as render,
    span as span,
)
