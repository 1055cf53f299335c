"""Decides statements of papers from results, and writes the answers as text and as a page."""

from experiments.verdicts.claims import (
    ANSWERS as ANSWERS,
    ERROR as ERROR,
    UNDECIDED as UNDECIDED,
    Answer as Answer,
    Judged as Judged,
    Statement as Statement,
    answer_statements as answer_statements,
    decide_answer as decide_answer,
    group_rows as group_rows,
    judge_rows as judge_rows,
)
from experiments.verdicts.curves import curve_row as curve_row
from experiments.verdicts.rows import (
    Row as Row,
    cases_row as cases_row,
    mean_row as mean_row,
)
from experiments.verdicts.sequential import list_rounds as list_rounds
from experiments.verdicts.statement_page import (
    Comparison as Comparison,
    Section as Section,
    comparison_line as comparison_line,
    render as render,
)
from experiments.verdicts.statements import (
    PROTOCOL as PROTOCOL,
    STATEMENTS as STATEMENTS,
    make_row as make_row,
)
from experiments.verdicts.statistics import (
    TableRow as TableRow,
    clipped_log10 as clipped_log10,
    finite_or_none as finite_or_none,
    fisher_exact as fisher_exact,
    format_interval as format_interval,
    mean_with_interval as mean_with_interval,
    power_law_wins as power_law_wins,
    seed_rows as seed_rows,
    slope as slope,
)
from experiments.verdicts.verdict_wording import (
    answer_lines as answer_lines,
    count_line as count_line,
    describe_measured as describe_measured,
    refuting_text as refuting_text,
    seeds_to_decide as seeds_to_decide,
    setting_text as setting_text,
    show_ratio as show_ratio,
    verdict_counts as verdict_counts,
)
