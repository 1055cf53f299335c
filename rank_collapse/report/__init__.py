"""Statements and their answers, figures from plain arrays, and the page that shows them."""

from rank_collapse.report.claims import (
    Answer as Answer,
    Row as Row,
    Statement as Statement,
    answers_of as answers_of,
)
from rank_collapse.report.page import (
    Comparison as Comparison,
    Section as Section,
    comparison_line as comparison_line,
    render as render,
)
from rank_collapse.report.wording import (
    answer_lines as answer_lines,
    count_line as count_line,
    number as number,
    span as span,
)
