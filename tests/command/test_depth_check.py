"""`rank-collapse depth-check`: the table of every number, the slopes, and mistakes in one line."""

import csv
import json

import pytest

from rank_collapse.command import main

SMALL = ("depth-check", "--width=8", "--base_width=8", "--depths=1,2", "--steps=2", "--seeds=2")


@pytest.mark.full
def test_rules_are_compared_at_every_depth(tmp_path, capsys):
    out = tmp_path / "depths.png"
    assert main([*SMALL, "--rules=sp,half", f"--out={out}"]) == 0
    shown = capsys.readouterr().out
    assert out.stat().st_size > 10_000 and "half: after 2 steps" in shown
    with open(out.with_suffix(".csv")) as file:
        rows = list(csv.DictReader(file))
    sizes = {(row["rule"], row["depth"], row["seed"], row["step"]) for row in rows}
    assert len(sizes) == len(rows) == 2 * 2 * 2 * 2
    assert float(rows[0]["loss"]) == pytest.approx(5.5, abs=0.2)  # ln 256 and a little more
    assert main([*SMALL, "--rules=sp", "--json"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["rule"] == "sp" and "answer" not in line["slopes"]["stream"]
    stream = line["slopes"]["stream"]
    assert stream["low"] < stream["slope"] < stream["high"]


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--rules=complete", "'complete'"),
        ("--depths=2,x", "'2,x'"),
        pytest.param("--depths=2,2", "(2, 2)", marks=pytest.mark.full),  # after training
        ("--text=nowhere.txt", "nowhere.txt"),
        ("--seeds=0", "--seeds: 0 is"),
        ("--seeds=99999999", "--seeds: 99999999 is"),
        ("--steps=0", "--steps: 0 is"),
        ("--steps=-1", "--steps: -1 is"),
        ("--depths=2,0", "--depths: 0 is"),
    ],
)
def test_a_mistake_is_one_line(flag, named, capsys):
    try:
        code = main([*SMALL, "--json", flag])
    except SystemExit as ended:  # of a flag that cannot be read
        code = ended.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
