"""Statements of papers and the answers that rows give them: in words, on a board and on a page."""

from experiments.verdicts.claims import (
    Answer as Answer,
    Row as Row,
    Statement as Statement,
    answer_statements as answer_statements,
)
from experiments.verdicts.page import (
    Comparison as Comparison,
    Section as Section,
    comparison_line as comparison_line,
    render as render,
)
from experiments.verdicts.wording import (
    answer_lines as answer_lines,
    count_line as count_line,
)
