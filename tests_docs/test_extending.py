"""The experiment of docs/extending.md, run as it stands there."""

import csv
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from experiments.lab import cli, read_run
from experiments.lab.folder import RunFolder
from experiments.verdicts.statements import STATEMENTS

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture
def ranks(monkeypatch):
    """The page's module, with its statement registered."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (text,) = (block for block in blocks if "EXPERIMENT" in block)
    module = ModuleType("experiments.run_ranks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(STATEMENTS, "ranks fall", STATEMENTS["falls"])
    exec(compile(text, str(PAGE), "exec"), module.__dict__)
    return module


def test_the_experiment_of_the_page_runs_and_is_read_again(ranks, tmp_path, monkeypatch):
    tiny = ranks.EXPERIMENT.presets["tiny"]
    arguments = [*tiny, "--weight_scale=0.5,1", "--jobs=1", f"--output_dir={tmp_path}"]
    assert cli.execute(ranks.main, ranks.FLAGS, arguments) == 0
    table = (tmp_path / "results.csv").read_bytes()
    rows = list(csv.DictReader(table.decode().splitlines()))
    assert len(rows) == 2 * 2 * 2  # scales, seeds, the input and a layer
    assert all(1 <= float(row["rank"]) <= 4 for row in rows)
    figure = tmp_path / "figures" / "ranks.png"
    figure.unlink()
    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("measured again"))
    assert cli.execute(ranks.main, ranks.FLAGS, arguments) == 0
    assert figure.exists() and (tmp_path / "results.csv").read_bytes() == table
    assert [*ranks.EXPERIMENT.figures] == ["ranks"] and all(ranks.EXPERIMENT.figures.values())
    claims = read_run(ranks, tmp_path).claims
    assert {row.setting for row in claims} == {"weight scale 0.5", "weight scale 1"}
