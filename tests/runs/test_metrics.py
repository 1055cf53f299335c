"""Files of metrics: what is written comes back, resumed runs, damaged lines."""

import itertools
import json
import re
from functools import partial

import numpy as np
import pytest

from experiments.lab.folder import RunFolder
from rank_collapse.runs import metrics
from rank_collapse.runs.files import RunError
from tests.support.refusals import each_is_refused, is_refused


@pytest.fixture
def path(tmp_path):
    """The path of a file of metrics."""
    return tmp_path / "m.jsonl"


def test_lines_are_valid_json_and_come_back(path):
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


def test_a_step_that_is_written_again_counts_once(path):
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
    places = [(row["seed"], row["step"]) for row in metrics.read(path)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert path.read_bytes().count(b"\n") == len(places)


def test_a_file_of_metrics_that_is_none_is_named(path):
    path.mkdir()
    for call in (lambda: metrics.drop(path, [0]), lambda: metrics.read(path)):
        is_refused("m.jsonl cannot be read: it is not a regular file", call, error=RunError)


def test_lines_are_dropped_of_the_seeds_and_steps_that_are_named(path):
    """A line without a seed is of seed 0; what is no line of a step stays."""
    lines = (
        '{"step": 0, "loss": 1}',
        '{"step": 2, "seed": 1, "loss": 2}',
        '{"step": 1, "loss": 3}',
        '{"step": true, "loss": 4}',
        '{"note": 1}',
        "[1]",
    )
    for options, kept in (
        ({"seeds": [0], "after": 0}, (0, 1, 3, 4, 5)),
        ({"seeds": [0]}, (1, 3, 4, 5)),
        ({"seeds": [1], "after": 2}, range(6)),
        ({"seeds": [0, 1], "after": 1}, (0, 2, 3, 4, 5)),
    ):
        path.write_text("".join(f"{line}\n" for line in lines) + '{"step": 0, "lo')
        metrics.drop(path, **options)
        assert path.read_text() == "".join(f"{lines[i]}\n" for i in kept)
        inode = path.stat().st_ino
        metrics.drop(path, **options)  # nothing is left to be dropped: the file is not written
        assert path.stat().st_ino == inode


def test_lines_nested_beyond_what_python_reads_are_dropped(path):
    line = '{"step": 0, "loss": 1}\n'
    path.write_text("[" * 100_000 + "\n" + line + '{"a": ' * 100_000 + "\n")
    metrics.drop(path, [1])
    assert path.read_text() == line


def test_rows_come_in_order_of_their_seeds_and_then_steps(path):
    places = [(1, 0), (5, 0), (1, 2), (3, None)]
    for step, seed in reversed(places):
        metrics.append(path, step, {"loss": 1.0}, seed=seed)
    rows = metrics.read(path)
    assert [(r["step"], r.get("seed")) for r in rows] == [(1, 0), (3, None), (5, 0), (1, 2)]


@pytest.mark.parametrize("content", ["", "\n", '{"step": 2, "lo', "[" * 100_000])
def test_a_file_in_which_nothing_is_finished_has_no_rows(path, content):
    path.write_text(content)
    assert metrics.read(path) == []
    metrics.append(path, 1, {"loss": [2]})
    assert len(metrics.read(path)) == 1 and metrics.read(path)[0]["loss"].tolist() == [2]


def test_the_folder_of_metrics_is_made_and_names_of_places_are_refused(path):
    for name in ("step", "seed"):
        is_refused(f"'{name}' of shape", metrics.append, path, 1, {name: 1.0})
    below = path.parent / "metrics" / "a.jsonl"
    values = {"a": True, "b": np.float32(0.25), "c": [0.1, 1e300]}
    metrics.append(below, np.int64(3), values, seed=2.0)
    text = '{"step": 3, "seed": 2, "a": 1.0, "b": 0.25, "c": [0.1, 1e+300]}\n'
    assert below.read_text() == text


def test_values_are_read_as_they_were_written(path):
    path.write_text('{"step": 1, "seed": 2.0, "a": null, "b": [1, null, "-Infinity"], "c": 3}\n')
    (row,) = metrics.read(path)
    assert np.isnan(row["a"]) and row["c"] == 3 and type(row["seed"]) is int
    np.testing.assert_array_equal(row["b"], [1, np.nan, -np.inf])


def test_a_line_cut_off_by_a_kill_is_left_out_and_does_not_spoil_the_next(path):
    metrics.append(path, 1, {"loss": 1.0})
    first_line = path.read_bytes()
    path.write_bytes(first_line + b'{"step": 2, "lo')
    assert len(metrics.read(path)) == 1
    metrics.append(path, 3, {"loss": 3.0})
    assert [row["step"] for row in metrics.read(path)] == [1, 3]


@pytest.mark.parametrize(
    "content, message",
    [
        ("[1]", "no JSON object"),
        ('{"loss": 1}', "'step'"),
        ('{"step": true}', "'step'"),
        ('{"step": 1.5, "loss": 1}', "'step'"),
        ('{"step": 1' + 400 * "0" + ".0}", "'step'"),
        ('{"step": 1' + 400 * "0" + "}", "'step'"),
        ('{"step": 1, "seed": [1]}', "'step'"),
    ],
)
def test_other_files_are_refused_in_a_line(path, tmp_path, content, message):
    path.write_text(content + "\n")
    each_is_refused(
        (lambda: metrics.read(path), message),
        (lambda: metrics.read(tmp_path / "absent"), "cannot be read"),
        error=RunError,
    )


@pytest.mark.parametrize(
    "value", ["[{}]", '{"b": 1}', '"begun"', '["2"]', "true", "1" + 400 * "0"], ids=str
)
def test_what_is_no_metric_is_left_out(path, value):
    """Left out are the value, and a line without a step; 1.0 is a step."""
    path.write_text(f'{{"_step": 0}}\n{{"step": 1.0, "a": {value}, "loss": 2}}\n')
    assert metrics.read(path) == [{"step": 1, "loss": 2.0}]


def test_values_of_other_shapes_are_refused(path):
    append = partial(metrics.append, path, 1)
    is_refused("'loss' of shape", append, {"loss": np.zeros((2, 2))})
    for wrong in ("hi", {"a": 1}, [1, [2, 3]]):
        message = re.escape(f"'note'={wrong!r} is not a metric")
        is_refused(message, append, {"loss": 1.0, "note": wrong})
    for wrong in (0.5, None, "3", np.nan):
        is_refused("step=.* is not a whole number", metrics.append, path, wrong, {"loss": 1.0})
    is_refused("seed=1.5 is not a whole number", append, {"loss": 1.0}, seed=1.5)
    is_refused("not a mapping", append, [1.0])
    assert not path.exists()


def test_the_run_folder_keeps_it_and_overwrite_deletes_it(tmp_path):
    with RunFolder(tmp_path, {"a": 1}) as run:
        metrics.append(run.path / metrics.NAME, 1, {"loss": 1.0}, seed=0)
    with RunFolder(tmp_path, {"a": 1}) as run:
        assert len(metrics.read(run.path / metrics.NAME)) == 1
    with RunFolder(tmp_path, {"a": 1}, overwrite=True) as run:
        assert not (run.path / metrics.NAME).exists()
