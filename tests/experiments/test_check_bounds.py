"""The lemma and the bounds on random draws: counted, written, and able to fail."""

import csv
import json

import numpy as np
import pytest
from second_run import check_second_run

from experiments import check_bounds
from experiments.bounds.results import counts, summary_of
from experiments.shell import cli

SHAPES = ((8, 12, 3), (3, 4, 1))


def execute(folder, *arguments):
    arguments = ["--num_draws=400", "--seed=1", f"--output_dir={folder}", *arguments]
    return cli.execute(check_bounds.main, check_bounds.FLAGS, arguments)


def test_lemma_and_bounds_hold_wherever_the_condition_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_bounds, "SHAPES", SHAPES)
    assert execute(tmp_path) == 0
    assert "lemma_violations             0\n" in capsys.readouterr().out
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["draws"], found["heads"]) == (400, 2 * 200 * (3 + 1))
    assert 100 < found["admissible"] < found["heads"]
    assert found["lemma_violations"] == 0 and found["head_violations"] == 0
    assert found["layer_violations"] == 0 and found["stack_violations"] == 0
    assert 0 < found["gamma_min"] < found["gamma_max"] and found["tightness_min"] > 0
    # the check can fail: without the condition the lemma does not hold
    assert found["lemma_violations_elsewhere"] > 0
    assert all(c.agrees for c in check_bounds.ENTRY.compare(found))
    assert not all(c.agrees for c in check_bounds.ENTRY.compare(found | {"head_violations": 1}))
    assert "0 violations" in check_bounds.ENTRY.reading(found)
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(int(r[n]) for n in ("tokens", "width", "num_heads")) for r in rows] == [*SHAPES]
    for name in ("heads", "admissible", "lemma_violations_elsewhere", "stacks_admissible"):
        assert sum(int(r[name]) for r in rows) == found[name]
    assert {f.stem for f in (tmp_path / "figures").iterdir()} == set(check_bounds.ENTRY.captions)
    monkeypatch.setattr(check_bounds, "draw_shape", lambda *a: pytest.fail("computed again"))
    check_second_run(lambda: execute(tmp_path), tmp_path, capsys)
    with pytest.raises(pytest.fail.Exception, match="computed again"):
        execute(tmp_path, "--overwrite")


def test_counts_are_of_what_the_condition_covers():
    flat = {
        "head_ok": [True, True, False], "head_tightness": [1.0, -1.0, -2.0],
        "lemma_excess": [-1.0, 2.0, 3.0], "gamma": [0.5, 0.25, 9.0],
        "layer_ok": [False], "layer_tightness": [-1.0],
        "stack_ok": [True], "stack_tightness": [-0.5],
    }  # fmt: skip
    draws = {(2, 2, 1): {name: np.array(values)[None] for name, values in flat.items()}}
    found = summary_of(draws)
    assert (found["heads"], found["admissible"], found["head_violations"]) == (3, 2, 1)
    assert (found["lemma_violations"], found["lemma_violations_elsewhere"]) == (1, 1)
    assert (found["layers_admissible"], found["layer_violations"]) == (0, 0)
    assert (found["stacks_admissible"], found["stack_violations"]) == (1, 1)
    assert (found["gamma_min"], found["gamma_max"], found["tightness_min"]) == (0.25, 0.5, -1)
    assert found["layer_tightness_min"] is None
    assert counts({name: np.array(values) for name, values in flat.items()}) == found
