"""Statements and their answers, figures from plain arrays, and the page that shows them."""

from rank_collapse.report.claims import Answer, Row, Statement, answers_of
from rank_collapse.report.page import (
    Comparison,
    Section,
    answer_lines,
    comparison_line,
    count_line,
    number,
    render,
    span,
)

__all__ = [
    "Answer",
    "Comparison",
    "Row",
    "Section",
    "Statement",
    "answer_lines",
    "answers_of",
    "comparison_line",
    "count_line",
    "number",
    "render",
    "span",
]
