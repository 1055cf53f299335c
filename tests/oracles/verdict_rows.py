"""Rows of made-up draws, and the verdicts and answers that statements give them."""

import math

from experiments.verdicts import claims, rows
from experiments.verdicts.claims import Statement

ABOVE = (0.0, math.inf)


def make_statement(claimed=ABOVE, **fields):
    return Statement("Section 1", "It is so.", "x", claimed, **fields)


def compute_verdict(row, claimed=ABOVE):
    (judged,) = claims.judge_rows([row], make_statement(claimed))
    return judged.verdict


def make_median_row(values, setting="here", claimed=ABOVE):
    return rows.median_row("key", setting, values, claimed)


def compute_answer(*rows, claimed=ABOVE, is_registered=False, **fields):
    return claims.answer_statement("key", make_statement(claimed, **fields), rows, is_registered)
