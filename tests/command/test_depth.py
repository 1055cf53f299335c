"""`rank-collapse depth`: its page and its files."""

import json

import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.command import depth
from tests.oracles.depth_reports import DEPTH
from tests.support.commands import run_command
from tests.support.folders import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "bert"


IDS = ("--ids=5,8,13,7", "--ids=7,6,1")


def test_a_page_of_depth_counts_layers_and_heads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(depth, "depth_report", lambda *_, **__: DEPTH)
    monkeypatch.setattr(depth, "draw_files", lambda figure: {".png": b"a picture"})
    out = tmp_path / "depth.html"
    run_command(capsys, "depth", str(GOLDEN.parent / "gpt2-head"), *IDS, "--out", str(out))
    page = out.read_text("utf-8")
    assert "2 layers" in page and "1 heads on a path" in page and "2 heads" not in page


@pytest.mark.full
def test_depth_writes_what_the_report_has(tmp_path, capsys):
    folder, out = GOLDEN.parent / "gpt2-head", tmp_path / "depth.html"
    run_command(capsys, "depth", str(folder), *IDS, "--out", str(out))
    source = rc.pretrained.open_checkpoint(folder)
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
