"""Numbers in texts about results: columns, formats, and what no table has."""

import pytest

from experiments.reproducing.filling import (
    fill,
    find_missing,
    read_numbers,
    write_minus,
    write_numbers,
)
from experiments.verdicts import rows
from experiments.verdicts.statement_page import Comparison

NUMBERS = read_numbers(
    write_numbers(
        [
            Comparison("accuracy", "0.994 (-0.991 to 0.998)", 0.98),
            Comparison("mean |x_L|", -503600.0),
            Comparison("log", -1.0),
            Comparison("small", -3.2e-7),
            Comparison("empty", float("nan")),
        ],
        [rows.mean_row("rate", "no norm, scale 1", [2.0, 3.0, 4.0])],
    )
)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{accuracy}", "0.994 (−0.991 to 0.998)"),
        ("{accuracy|.2f} of {accuracy|published|.1f}", "0.99 of 1.0"),
        ("{mean |x_L||.1e}", "−5.0e5"),
        ("{small|.1e}, {small}", "−3.2e−7, −3.2e−07"),
        ("{log|10^.2f}, {log|10^.0%}", "0.10, 10 %"),
        ("{rate: no norm, scale 1|interval|.1f}", "3.0 (0.5 to 5.5)"),
        ("{rate: no norm, scale 1|draws|.0f}", "3"),
        ("{log; mean |x_L|; accuracy|range|.1f}", "−503600.0 to 1.0"),
        (
            "{accuracy; log; small|range|10^.1f}, {small; log|range|}",
            "0.1 to 9.9, −1.0 to −3.2e−07",
        ),
        ("{accuracy|range|.1f}, {log; rate: no norm, scale 1|range|.0f}", "1.0 to 1.0, −1 to 3"),
        ("{no row|.2f}, {log|low|.2f}, {empty|.2f}", "–, –, –"),
        ("{log; no row|range|.2f}, {log; empty|range|.2f}, {log; empty|range|}", "–, –, –"),
    ],
)
def test_placeholders(text, filled):
    assert fill(text, NUMBERS) == filled


def test_what_no_table_has_is_named():
    text = "{log|.1f} {other: row|.2f} {log|interval|.1f} {empty|.1f} {mean |x_L||low|.1f}"
    missing = ["other: row|.2f", "log|interval|.1f", "empty|.1f", "mean |x_L||low|.1f"]
    assert find_missing(text, NUMBERS) == missing


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("-3 to -2.5", "−3 to −2.5"),
        ("1.2e-5, -1e-05, 2.e+3", "1.2e−5, −1e−05, 2.e+3"),
        ("(-1, |-2|", "(−1, |−2|"),
        ("GPT-2, 1-3, base-2, layer_-1, 0.-1", "GPT-2, 1-3, base-2, layer_-1, 0.-1"),
        ("post-LN - no number", "post-LN - no number"),
    ],
)
def test_a_minus_is_of_a_number_and_not_of_a_word(text, written):
    assert write_minus(text) == written
