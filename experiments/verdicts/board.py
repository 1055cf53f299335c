"""The board of statements: the answer to each, and its settings against the claimed range."""

from collections.abc import Sequence

from experiments.verdicts.claims import Answer, count_answers
from experiments.verdicts.wording import (
    JOINTLY,
    count_line,
    estimate_text,
    refuting_text,
    row_note,
    verdict_counts,
)
from rank_collapse.report.page import escape_html, wrap_wide

NOT_TESTED = "not tested"


def render_board(answers: Sequence[Answer], untested: Sequence[str] = ()) -> str:
    """Renders all statements, folded under their counts.

    Args:
        answers: Their answers.
        untested: Texts of the statements that were not tested.
    """
    counts = {answer: count for answer, count in count_answers(answers).items() if count}
    counts |= {NOT_TESTED: len(untested)} if untested else {}
    count_html = "".join(
        f'<span class="answer {_css_class(name)}">{name}: {count}</span>'
        for name, count in counts.items()
    )
    statements = "".join(map(render_statement, answers))
    for text in untested:
        statements += '<div class="statement"><p><span class="answer not-tested">'
        statements += f"{NOT_TESTED}</span> {escape_html(text)}</p></div>"
    return (
        f'<p class="counts">{count_html}</p>'
        f"<p>{escape_html(count_line(answers))}</p>"
        f"<details><summary>How they are judged</summary><p>{escape_html(JOINTLY)}</p></details>"
        f"<details><summary>All statements</summary>{statements}</details>"
    )


def render_statement(answer: Answer) -> str:
    """Renders one statement: its answer, text and quantity; settings with numbers unfold."""
    statement, rows = answer.statement, ""
    for j in answer.rows:
        verdict = j.verdict if statement.claimed else ""
        rows += f'<tr><td>{escape_html(j.row.setting)}</td><td class="number">'
        rows += f"{escape_html(estimate_text(j))}</td><td>{escape_html(row_note(j.row))}</td>"
        rows += f'<td class="{_css_class(j.verdict)}">{verdict}</td></tr>'
    quantity, label = statement.statistic, answer.answer
    if statement.claimed:
        quantity += f"; refuted by: {refuting_text(statement)}"
        label += f" {verdict_counts([j.verdict for j in answer.rows])}"
    return (
        f'<details class="statement"><summary>'
        f'<span class="answer {_css_class(answer.answer)}">{escape_html(label)}</span>'
        f"<span>{escape_html(statement.text)} "
        f'<span class="source">{escape_html(statement.source)}</span></span>'
        f'<span class="small">{escape_html(quantity)}</span></summary>'
        f"{wrap_wide(f'<table>{rows}</table>')}</details>"
    )


def _css_class(words):
    return escape_html(words).replace(" ", "-")
