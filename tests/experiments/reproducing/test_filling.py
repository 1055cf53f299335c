"""Numbers in texts about results: columns, formats, and what no table has."""

import pytest

from experiments.lab import list_experiments
from experiments.reproducing import filling
from experiments.reproducing.filling import (
    PLACEHOLDER,
    Texts,
    fill,
    find_missing,
    read_numbers,
    read_settings,
    read_texts,
    split_placeholder,
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
            Comparison("log", 7.0, note="a second row of the name"),
            Comparison("low", 1234567.0, "falls", source="theorem"),
            Comparison("change", "-0.002 (-0.016 to 0.011)"),
        ],
        [rows.mean_row("rate", "no norm, scale 1", [2.0, 3.0, 4.0], note="of three seeds")],
    )
)


@pytest.mark.parametrize(
    ("cell", "number"),
    [("below 1e-06 (rounding)", 1e-6), ("BLEU 27.80", 27.8), ("'-0.002 (-0.016)", -0.002)],
)
def test_words_may_precede_the_number_of_a_cell(cell, number):
    assert filling.read_number(cell) == number


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
        ("{log|low|}, {empty}, {empty|}", "–, –, –"),
        ("{log; no row|range|.2f}, {log; empty|range|.2f}, {log; empty|range|}", "–, –, –"),
        ("{low|.1e}, {low|.0f}", "1.2e6, 1234567"),
        ("{change}", "−0.002 (−0.016 to 0.011)"),
        ("{rate: no norm, scale 1|high|.2f}", "5.48"),
    ],
)
def test_placeholders(text, filled):
    assert fill(text, NUMBERS) == filled


def test_a_row_has_its_source_and_its_note():
    """A number that stands alone has no source."""
    low, alone, claim = (NUMBERS[n] for n in ("low", "log", "rate: no norm, scale 1"))
    assert (low["published"], low["source"]) == ("falls", "theorem")
    assert (alone["published"], alone["source"], alone["note"]) == ("", "", "")
    assert claim["note"] == "of three seeds"


def test_flags_of_a_run_are_numbers_of_texts():
    """One value as it is, several by commas."""
    settings = read_settings({"n_epochs": 20, "depth": ["2", "4"], "text": None})
    assert fill("{--n_epochs|.0f} of {--depth}, {--text}", settings) == "20 of 2, 4, None"


def test_what_no_table_has_is_named():
    text = "{log|.1f} {other: row|.2f} {log|interval|.1f} {empty} {mean |x_L||low|.1f}"
    missing = ["other: row|.2f", "log|interval|.1f", "empty", "mean |x_L||low|.1f"]
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


def test_texts_are_those_of_the_file_by_experiment(tmp_path, monkeypatch):
    first = 'result = "{x} “so”."\ntable = "| {y} |"\nsettings = ["2"]'
    content = f'[run_a]\n{first}\n\n[run_b]\nresult = "b"'
    (tmp_path / "results.toml").write_text(content, "utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(filling, "TEXTS", tmp_path / "results.toml")
        assert read_texts() == {
            "run_a": Texts("{x} “so”.", "| {y} |", ["2"]),
            "run_b": Texts("b"),
        }
    texts = read_texts()
    assert texts.keys() == {*list_experiments()}
    for text in texts.values():
        for placeholder in PLACEHOLDER.findall(text.result + text.table):
            form = split_placeholder(placeholder)[2].removeprefix("10^")
            assert float(format(1.0, form).rstrip("%")) >= 1, placeholder
