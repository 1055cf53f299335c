"""Whether a results.csv keeps to docs/columns.md, and reads as numbers."""

import csv
import io
import math

import numpy as np
import pytest
from data_dictionary import check_columns

from rank_collapse.runs.folder import RunFolder

SOME = [
    {"seed": 0, "evaluation": "sampled", "path_length": 2, "num_paths": 5, "loss": 0.1},
    {"seed": np.int64(1), "evaluation": "exact", "path_length": 0, "loss": np.float32(0.1)},
    {"seed": 2, "evaluation": "offset", "loss": float("nan")},
    {"seed": 3, "evaluation": "exact", "path_length": 1, "loss": 1e-300},
]


def written(folder, rows):
    with RunFolder(folder, {}) as run:
        run.write_rows(rows)
    return (folder / "results.csv").read_text("utf-8")


def test_columns_of_numbers_read_as_numbers(tmp_path):
    text = written(tmp_path, SOME)
    table = list(csv.DictReader(io.StringIO(text)))
    check_columns(table)
    for row, given in zip(table, SOME, strict=True):
        assert row.keys() == {"seed", "evaluation", "path_length", "num_paths", "loss"}
        for name, value in row.items():
            want = given.get(name, "")
            if want == "" or isinstance(want, str):
                assert value == want
            else:
                assert float(value) == want or (math.isnan(want) and math.isnan(float(value)))


def test_a_word_among_numbers_is_refused(tmp_path):
    mixed = [{"seed": 0, "path_length": 1}, {"seed": 0, "path_length": "none"}]
    with pytest.raises(ValueError, match="none"):
        check_columns(list(csv.DictReader(io.StringIO(written(tmp_path, mixed)))))
    with pytest.raises(AssertionError, match="evaluation"):
        check_columns([{"evaluation": "whole"}, {"evaluation": "3"}])
    with pytest.raises(LookupError, match="no column 'colour'"):
        check_columns([{"colour": "3"}])
