"""`rank-collapse depth`: its page and its files."""

import csv
import dataclasses
import html
import json
import re
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.command import checkpoint, depth
from rank_collapse.pretrained.report import tabulate_lengths
from rank_collapse.pretrained.used_depth import DepthUsed
from tests.oracles.depth_reports import DEPTH
from tests.support.commands import run_command
from tests.support.folders import REPOSITORY
from tests.support.refusals import is_refused

GPT2 = REPOSITORY / "tests" / "golden" / "gpt2-head"


IDS = ("--ids=5,8,13,7", "--ids=7,6,1")


@pytest.mark.parametrize("is_random", [False, True])
def test_what_depth_measures_and_writes(is_random, tmp_path, capsys, monkeypatch):
    """Both texts with their mask; the page, the table and the JSON file have the same numbers."""
    used = {
        "of layers": DepthUsed(2, "a definition", "a paper"),
        "of none": DepthUsed(None, "no number", "a paper"),
        "of more": DepthUsed(3, "most of it", "a paper"),
    }
    report, measured = dataclasses.replace(DEPTH, used=used), []

    def measure(source, ids, *, mask, unembedding, done):
        measured.append((source, ids.tolist(), mask.tolist(), unembedding.table.shape))
        return report

    monkeypatch.setattr(depth, "depth_report", measure)
    monkeypatch.setattr(depth, "draw_files", lambda figure: {".png": b"a picture"})
    out = tmp_path / "the depth.html"
    name = f"random:{GPT2}" if is_random else str(GPT2)
    printed = run_command(capsys, "depth", name, *IDS, "--out", str(out)).splitlines()
    ((source, ids, mask, shape),) = measured
    assert ids == [[5, 8, 13, 7], [7, 6, 1, 0]] and mask == [[True] * 4, [True] * 3 + [False]]
    assert shape == (source.config.embedding.vocab_size, source.config.d_model)
    about = "random weights: " if is_random else ""
    weights = "random weights" if is_random else "of the checkpoint"
    verdict = (
        f"{about}Of 3 layers the definitions count from 2 (“of layers”) to 3 (“of more”); of heads "
        "on a path: paths, loss 1."
    )
    written = f"written to {out}, {out.with_suffix('.json')} and {out.with_suffix('.csv')}"
    assert printed == [*f"{about}{report}".split("\n"), "The ids of --ids.", written]

    numbers = json.loads(out.with_suffix(".json").read_text())
    layers = {name: checkpoint.to_json(a) for name, a in report.by_layer().items()}
    command = shlex.join(["python", "-m", "rank_collapse", "depth", name, *IDS, "--out", str(out)])
    assert numbers == {
        "source": name,
        "weights": weights,
        "command": command,
        "tokens": "The ids of --ids.",
        "rank_collapse": rc.__version__,
        "verdict": verdict,
        "used": {name: one._asdict() for name, one in used.items()},
        "lengths": {name: one._asdict() for name, one in report.lengths.items()},
        "path_lengths": tabulate_lengths(report.length_laws),
        "layers": layers,
    }
    page = out.read_text("utf-8")
    assert f"<h1>Depth used by {name}</h1><p>{verdict} 2 texts of 3 to 4 tokens: The ids" in page
    assert f'<h2 id="depth">{about}{name}</h2>' in page
    assert f"<pre>{html.escape(command)}</pre>" in page and "By layer; bands over texts." in page
    cells = re.findall("<td[^>]*>(.*?)</td>", page)
    assert [cells[start : start + 4] for start in range(0, 16, 4)] == [
        ["of layers", "2 layers", "a definition", "a paper"],
        ["of none", "none", "no number", "a paper"],
        ["of more", "3 layers", "most of it", "a paper"],
        ["paths, loss", "1 head on a path", "another", "a paper"],
    ]
    head, *rows = csv.reader(out.with_suffix(".csv").read_text().splitlines())
    assert head == ["weights", "layer", *layers]
    assert [row[:2] for row in rows] == [[weights, str(layer)] for layer in range(4)]
    columns = zip(*(row[2:] for row in rows), strict=True)
    for column, values in zip(columns, report.by_layer().values(), strict=True):
        np.testing.assert_array_equal([float(cell) for cell in column], values)


@pytest.mark.full
def test_depth_writes_what_the_report_has(tmp_path, capsys):
    out = tmp_path / "depth.html"
    run_command(capsys, "depth", str(GPT2), *IDS, "--out", str(out))
    source = rc.pretrained.open_checkpoint(GPT2)
    report = rc.depth_report(source, [[5, 8, 13, 7], [7, 6, 1]])
    written = json.loads(out.with_suffix(".json").read_text())
    for field in ("used", "lengths"):
        assert written[field] == {
            name: one._asdict() for name, one in getattr(report, field).items()
        }
    for name, values in report.by_layer().items():
        np.testing.assert_allclose(np.array(written["layers"][name], float), values, rtol=1e-5)
    assert "data:image/png" in out.read_text("utf-8")
    assert len(out.with_suffix(".csv").read_text().splitlines()) == report.depth + 2


def test_no_layer_at_all_is_a_number():
    """None is another thing: that the definition counts nothing."""
    used = {"a": DepthUsed(0, "of a", "A 2020"), "b": DepthUsed(None, "of b", "B 2021")}
    assert [row["used"] for row in depth._definition_rows(used, "layer")] == ["0 layers", "none"]
    used = {"a": DepthUsed(1, "of a", "A 2020"), "b": DepthUsed(2, "of b", "B 2021")}
    rows = depth._definition_rows(used, "head", " on a path")
    assert [row["used"] for row in rows] == ["1 head on a path", "2 heads on a path"]


def test_the_verdict_has_the_extremes_and_the_length_by_each_definition():
    used = {
        "mean": DepthUsed(5, "", ""), "few": DepthUsed(2, "", ""), "many": DepthUsed(7, "", ""),
    }  # fmt: skip
    lengths = {"of paths": SimpleNamespace(length=3), "of gradients": SimpleNamespace(length=4)}
    measured = SimpleNamespace(depth=9, used=used, lengths=lengths)
    assert depth.write_verdict(measured) == (
        "Of 9 layers the definitions count from 2 (“few”) to 7 (“many”); of heads on a path: "
        "of paths 3; of gradients 4."
    )
    measured.depth = 1
    assert depth.write_verdict(measured).startswith("Of 1 layer the definitions")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_json_has_null_for_what_is_not_finite(value):
    values = {"a": np.array([1.0, value]), "b": value, "c": (value, 2.0), "d": [{"e": (value,)}]}
    expected = {"a": [1, None], "b": None, "c": [None, 2.0], "d": [{"e": [None]}]}
    assert checkpoint.to_json(values) == expected


@pytest.mark.parametrize("printed", ["json", "csv", None])
def test_numbers_that_are_printed_need_no_picture(printed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    numbers = dict.fromkeys(("num_texts", "max_tokens"))
    flags = SimpleNamespace(out=str(tmp_path / "a.html"), json=False, csv=False, **numbers)
    if printed:
        setattr(flags, printed, True)
        checkpoint.check_output(flags)
    else:
        with pytest.raises(ModuleNotFoundError, match="needs matplotlib"):
            checkpoint.check_output(flags)


@pytest.mark.parametrize("name", ["num_texts", "max_tokens"])
@pytest.mark.parametrize("value", [0, 10**6 + 1])
def test_numbers_of_texts_and_tokens_have_limits(name, value, tmp_path):
    numbers = {"num_texts": None, "max_tokens": 10**6} | {name: value}
    flags = SimpleNamespace(out=str(tmp_path / "a.html"), json=True, csv=False, **numbers)
    is_refused(f"--{name} {value} is not from 1 to 1000000", checkpoint.check_output, flags)
