"""Claims and their verdicts, figures from plain arrays, and the page that shows them."""

from rank_collapse.report.claims import Claim
from rank_collapse.report.page import (
    Comparison,
    Section,
    claim_line,
    comparison_line,
    count_line,
    number,
    render,
    span,
)

__all__ = [
    "Claim",
    "Comparison",
    "Section",
    "claim_line",
    "comparison_line",
    "count_line",
    "number",
    "render",
    "span",
]
