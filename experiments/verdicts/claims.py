"""Statements of papers, and the answers that follow from the rows that test each of them.

A statement has one statistic and the open range that it claims for it. Each setting (norm,
architecture, width, task) gives a row (`experiments.verdicts.rows`). The rows of a statement are
judged together: verdicts hold jointly, at any number of draws. Each interval holds by itself.

A statement that could hardly fail names the test that checks it; a number without a claim is a
finding. Neither has a range: their rows are shown with their intervals and get no answer. The rows
of a statement that must hold may differ from it where their networks do not meet its assumptions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.verdicts.rows import Range, Row, missing_row
from experiments.verdicts.sequential import reject_jointly
from rank_collapse.report.intervals import Interval

HOLDS, IN_PART, SOME_FAIL, FAILS, NOT_REJECTED, OPEN = ANSWERS = (
    "holds",
    "in some settings",
    "not in all settings",
    "does not hold",
    "not rejected",
    "open",
)
MUST_HOLD, FINDING = "must hold", "finding"  # in the place of an answer
WITHIN, OUTSIDE, UNDECIDED, NOT_MEASURED = "within", "outside", "undecided", "not measured"
VERDICTS = (WITHIN, OUTSIDE, UNDECIDED, NOT_MEASURED, NOT_REJECTED)
ERROR = 0.05  # the largest share of runs in which chance gives a statement a wrong verdict


@dataclass(frozen=True)
class Statement:
    """A paper's statement with its range, or a finding without a range."""

    source: str  # The paper and the theorem, section or figure
    text: str  # What it says, in our words, with its number
    statistic: str  # What is computed of each draw, with its unit
    claimed: Range | None = None  # The open range in which it holds; None without an answer
    # The open range of a draw, where rows are shares of draws; `claimed` is that of the share
    draw_range: Range | None = None
    # Whether the rows test what is claimed, so that it may be rejected and cannot be shown
    tests_claim: bool = False
    experiments: Sequence[str] = ()  # Whose rows test it
    settings: Sequence[str] = ()  # Of its rows, as registered before they are measured
    test: str = ""  # Of what must hold: the test that checks it, "tests/file.py::test_name"
    criterion: str = ""  # What this test requires, with its tolerance, where `text` has neither


@dataclass(frozen=True)
class Judged:
    """A row with its interval and one of `VERDICTS`."""

    row: Row
    interval: Interval
    verdict: str


@dataclass(frozen=True)
class Answer:
    """The answer to a statement, one of `ANSWERS`, `MUST_HOLD` or `FINDING`, with its rows."""

    key: str
    statement: Statement
    answer: str
    rows: tuple[Judged, ...]

    @property
    def in_words(self) -> str:
        """Writes the answer: "open after 64" with the draws of the rows that are not decided."""
        num_made = [j.row.num_made for j in self.rows if j.verdict == UNDECIDED]
        return (
            f"{self.answer} after {max(num_made)}"
            if self.answer == OPEN and num_made
            else self.answer
        )


def judge_rows(
    rows: Sequence[Row], statement: Statement, num_rows: int | None = None
) -> tuple[Judged, ...]:
    """Judges the rows of one statement jointly: within the range, outside, or undecided.

    Holm's procedure at 2.5 %, once for "within" and once for "outside"; at 5 % for rows that test a
    claim. The error of all rows together is at most 5 %, whatever the dependence between rows and
    whenever the run stops. A row has the interval of the level at which it was compared: 95 % or
    more, so that the interval of a decided row lies on the side of its verdict. Each interval holds
    by itself. All intervals of a statement together hold in fewer than 95 % of runs, because
    Holm's levels add up to an error of 5 % (1 + 1/2 + … + 1/k) for k rows.

    Args:
        rows: Rows of one statement.
        statement: The statement.
        num_rows: Number of rows that are judged together, where the rows of other experiments do
            not exist yet.

    Returns:
        The rows with their verdicts, in their order.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure". At any stop p may
    be 1/max E: Vovk and Wang 2021, "E-values: calibration, combination and applications".
    """
    count = max(len(rows), num_rows or 0)
    if not rows:
        return ()
    if statement.tests_claim:
        return tuple(_judge_tests(rows, count))
    log_p_within, log_p_outside = [], []  # of the tests that show each side
    for row in rows:
        is_tested = row.evidence is not None and statement.claimed is not None
        within, outside = row.evidence.log_p() if is_tested else (0.0, 0.0)
        log_p_within.append(within)
        log_p_outside.append(outside)
    is_within, errors_within = reject_jointly(log_p_within, ERROR / 2, count)
    is_outside, errors_outside = reject_jointly(log_p_outside, ERROR / 2, count)
    judged = []
    for i, row in enumerate(rows):
        verdict, error = UNDECIDED, ERROR / 2 / count
        within_is_likelier = log_p_within[i] <= log_p_outside[i]
        if is_within[i] and (within_is_likelier or not is_outside[i]):
            verdict, error = WITHIN, errors_within[i]
        elif is_outside[i]:
            verdict, error = OUTSIDE, errors_outside[i]
        judged.append(_judge(row, verdict, error))
    return tuple(judged)


def _judge(row, verdict, error):
    """Make a row's verdict: undecided becomes "not measured" if the row has no draws.

    Args:
        row: The row.
        verdict: Verdict of the joint test of all rows.
        error: Error of one side at which the row was tested, which sets the level 1 − 2 · error of
            its interval.
    """
    if verdict == UNDECIDED and not row.num_made:
        verdict = NOT_MEASURED
    return Judged(row, row.interval(1 - 2 * error), verdict)


def _judge_tests(rows, count):
    """Judge rows that test a claim by a p-value: rejected, not rejected, or undecided because no p
    of so few draws could be small enough.

    Args:
        rows: The rows.
        count: Number of rows that are judged together.

    Yields:
        The rows with their verdicts.
    """
    log_p = [0.0 if row.p is None else math.log(row.p) for row in rows]
    is_rejected, _ = reject_jointly(log_p, ERROR, count)
    for row, rejected in zip(rows, is_rejected, strict=True):
        can_reject = (row.draws + 1) * ERROR >= count - 1e-9
        if rejected:
            verdict = OUTSIDE
        else:
            verdict = NOT_REJECTED if can_reject else UNDECIDED
        yield _judge(row, verdict, ERROR / 2 / count)


def answer_statement(
    key: str, statement: Statement, rows: Sequence[Row], is_registered: bool = False
) -> Answer:
    """Answers a statement from all its rows.

    Args:
        key: Key of the statement.
        statement: The statement.
        rows: All rows of the statement.
        is_registered: Whether the rows should be those of the registered settings, so that a
            setting without a row is "not measured".
    """
    rows = list(rows)
    if is_registered:
        present = {row.setting for row in rows}
        rows += [missing_row(key, s) for s in statement.settings if s not in present]
    judged = judge_rows(rows, statement)
    return Answer(key, statement, decide_answer(statement, [j.verdict for j in judged]), judged)


def decide_answer(statement: Statement, verdicts: Sequence[str]) -> str:
    """Returns the answer that follows from the verdicts of a statement's rows.

    - every row is within its range: it holds
    - every row is outside: it does not hold
    - some rows are within, others outside: it holds in some settings
    - some rows are outside, and none is within: it does not hold in all settings
    - no row is rejected, of a statement that can only be rejected: it is not rejected
    - otherwise, a row is undecided or not measured: it is open

    Args:
        statement: The statement.
        verdicts: Verdicts of the statement's rows.

    Returns:
        One of `ANSWERS`; without a range `MUST_HOLD` or `FINDING`.
    """
    if statement.claimed is None:
        return MUST_HOLD if statement.test else FINDING
    for verdict, answer in ((WITHIN, HOLDS), (OUTSIDE, FAILS), (NOT_REJECTED, NOT_REJECTED)):
        if {*verdicts} == {verdict}:
            return answer
    if OUTSIDE in verdicts:
        return IN_PART if WITHIN in verdicts else SOME_FAIL
    return OPEN


def answer_statements(
    statements: Mapping[str, Statement], rows: Iterable[Row], is_registered: bool = False
) -> list[Answer]:
    """Answers the statements that have rows, in the order of the statements.

    Args:
        statements: Statements by key.
        rows: Rows of any of them.
        is_registered: See `answer_statement`.

    Raises:
        ValueError: A row names a statement that does not exist.
    """
    by_key = group_rows(rows)
    if unknown := sorted(by_key.keys() - statements.keys()):
        raise ValueError(f"{unknown[0]!r} is not one of the statements")
    return [
        answer_statement(k, s, by_key[k], is_registered)
        for k, s in statements.items()
        if k in by_key
    ]


def group_rows(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Groups rows by their statement."""
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    return by_key


def count_answers(answers: Sequence[Answer]) -> dict[str, int]:
    """Counts {answer: statements that have it}, all of `ANSWERS`."""
    return {answer: sum(a.answer == answer for a in answers) for answer in ANSWERS}
