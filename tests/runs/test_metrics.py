"""metrics.jsonl: lines appended, read back whatever happened between."""

import itertools
import json
import re

import numpy as np
import pytest
from refusals import each_is_refused

from rank_collapse.runs import metrics
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder


def test_lines_are_valid_json_and_come_back(tmp_path):
    path = tmp_path / "m.jsonl"
    by_layer = [1.0, np.nan, np.inf, -np.inf]
    metrics.append(path, 3, {"loss": np.float32(0.5), "by_layer": by_layer}, seed=1)
    metrics.append(path, 2, {"loss": np.inf, "other": np.nan})
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    first, second = metrics.read(path)
    assert first["step"] == 2 and first["loss"] == np.inf and "seed" not in first
    assert np.isnan(first["other"])
    assert (second["step"], second["seed"], second["loss"]) == (3, 1, 0.5)
    np.testing.assert_array_equal(second["by_layer"], by_layer)


def test_a_step_that_is_written_again_counts_once(tmp_path):
    path = tmp_path / "m.jsonl"
    for step, loss in ((1, 3.0), (2, 2.0), (1, 1.0)):
        metrics.append(path, step, {"loss": loss})
    assert [row["loss"] for row in metrics.read(path)] == [1.0, 2.0]


def test_lines_that_are_written_again_are_dropped_before(tmp_path):
    path = tmp_path / metrics.NAME
    metrics.drop(path, [0])  # nothing there
    assert not path.exists()
    for step, seed in itertools.product(range(4), range(3)):
        metrics.append(path, step, {"loss": 1.0}, seed=seed)
    with open(path, "ab") as file:
        file.write(b'{"step": 9, "lo')
    metrics.drop(path, iter([0, 2]), 1)
    left = [(row["seed"], row["step"]) for row in metrics.read(path)]
    assert left == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert path.read_bytes().count(b"\n") == len(left)


def test_a_line_cut_off_by_a_kill_is_left_out_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "m.jsonl"
    metrics.append(path, 1, {"loss": 1.0})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 2, "lo')
    assert len(metrics.read(path)) == 1
    metrics.append(path, 3, {"loss": 3.0})
    assert [row["step"] for row in metrics.read(path)] == [1, 3]


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1]", "no JSON object"),
        ('{"loss": 1}', "'step'"),
        ('{"step": true}', "'step'"),
        ('{"step": 1, "seed": [1]}', "line 1: 'seed' is no whole number"),
        ('{"step": 1, "a": [{}]}', "line 1: 'a' is neither"),
        ('{"step": 1, "a": {"b": 1}}', "'a' is neither"),
        ('{"step": 1, "note": "begun"}', "'note' is neither"),
        ('{"step": 1, "a": ["2"]}', "'a' is neither"),
        ('{"step": 1, "a": true}', "'a' is neither"),
        ('{"step": 1, "a": 1' + 400 * "0" + "}", "'a' is neither"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path, content, message):
    path = tmp_path / "m.jsonl"
    path.write_text(content + "\n")
    each_is_refused(
        (lambda: metrics.read(path), message),
        (lambda: metrics.read(tmp_path / "absent"), "cannot be read"),
        error=RunError,
    )


def test_values_of_other_shapes_are_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    with pytest.raises(ValueError, match="'loss' of shape"):
        metrics.append(path, 1, {"loss": np.zeros((2, 2))})
    for wrong, shown in (("hi", "'hi'"), ({"a": 1}, "{'a': 1}"), ([1, [2, 3]], "[1, [2, 3]]")):
        with pytest.raises(ValueError, match=re.escape(f"'note'={shown} is not a metric")):
            metrics.append(path, 1, {"loss": 1.0, "note": wrong})
    assert not path.exists()


def test_the_run_folder_keeps_it_and_overwrite_deletes_it(tmp_path):
    with RunFolder(tmp_path, {"a": 1}) as run:
        run.append_metrics(1, {"loss": 1.0}, seed=0)
    with RunFolder(tmp_path, {"a": 1}) as run:
        assert len(metrics.read(run.path / metrics.NAME)) == 1
    with RunFolder(tmp_path, {"a": 1}, overwrite=True) as run:
        assert not (run.path / metrics.NAME).exists()
