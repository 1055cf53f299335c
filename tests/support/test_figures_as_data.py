"""Tests of what the tests of runs use: digests of figures, and the check of columns.

Equal figures have equal digests, and others do not. The check reads a results.csv as
experiments/lab/columns.csv describes it.
"""

import csv
import io
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.lab.folder_files import table_bytes
from rank_collapse.runs.drawn import draw_files
from tests.support.data_dictionary import check_columns
from tests.support.figures_as_data import as_data


def figure(method, *arguments):
    fig, ax = plt.subplots()
    getattr(ax, method)(*arguments)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    plt.close(fig)
    return fig


PAIRS = [([0.0, 1.0], [1.0, value]) for value in (1.0, 2.0)]


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        *((method, *PAIRS) for method in ("plot", "scatter", "bar", "fill_between")),
        ("imshow", ([[0.0, 1.0]],), ([[0.0, 2.0]],)),
        ("text", (0.5, 0.5, "a"), (0.5, 0.5, "b")),
        ("set_title", ("a",), ("b",)),
    ],
)
def test_equal_figures_are_equal_files_and_others_are_not(method, one, other):
    first = as_data(figure(method, *one))
    assert as_data(figure(method, *one)) == first != as_data(figure(method, *other))


def test_texts_of_the_first_figure_of_a_kind_are_set():
    with pytest.raises(ValueError, match="Expected"):
        as_data(figure("set_title", "$\\frac{$"))


def test_a_figure_of_users_is_the_same_files_each_time():
    first, second = (draw_files(figure("plot", [1, 2, 3])) for _ in range(2))
    assert first == second and b"CreationDate" not in first[".pdf"]


SOME = [
    {"seed": 0, "evaluation": "sampled", "path_length": 2, "num_paths": 5, "loss": 0.1},
    {"seed": np.int64(1), "evaluation": "exact", "path_length": 0, "loss": np.float32(0.1)},
    {"seed": 2, "evaluation": "offset", "loss": float("nan")},
    {"seed": 3, "evaluation": "exact", "path_length": 1, "loss": 1e-300},
]


def test_columns_of_numbers_read_as_numbers():
    text = table_bytes(SOME).decode()
    table = list(csv.DictReader(io.StringIO(text)))
    check_columns(table)
    for row, original in zip(table, SOME, strict=True):
        assert row.keys() == {"seed", "evaluation", "path_length", "num_paths", "loss"}
        for name, value in row.items():
            expected = original.get(name, "")
            if expected == "" or isinstance(expected, str):
                assert value == expected
            else:
                assert float(value) == expected or (
                    math.isnan(expected) and math.isnan(float(value))
                )


def test_a_word_among_numbers_is_refused():
    mixed = [{"seed": 0, "path_length": 1}, {"seed": 0, "path_length": "none"}]
    with pytest.raises(ValueError, match="none"):
        check_columns(list(csv.DictReader(io.StringIO(table_bytes(mixed).decode()))))
    with pytest.raises(AssertionError, match="evaluation"):
        check_columns([{"evaluation": "whole"}, {"evaluation": "3"}])
    with pytest.raises(LookupError, match="no column 'colour'"):
        check_columns([{"colour": "3"}])
