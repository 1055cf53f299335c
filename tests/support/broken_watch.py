"""What can break while `watch` measures: its measures, its log, the disk."""

import pytest

pytest.importorskip("torch")

from rank_collapse.measures import table
from rank_collapse.runs import metrics
from rank_collapse.watch import torch_hidden, torch_passes, torch_products, torch_watch

BROKEN = ("measures", "products", "gradients", "hidden", "all", "log", "disk")


def raises(*_, **__):
    raise OSError("no space left on device")


def break_part(broken, monkeypatch, folder):
    """Breaks one of `BROKEN`; returns the argument `log` for the watch."""
    if broken == "measures":
        for name in table.MEASURES:
            monkeypatch.setitem(table.MEASURES, name, raises)
    parts = {
        "products": (torch_products, "choose_rows"),
        "gradients": (torch_watch, "measure_gradient"),
        "hidden": (torch_hidden.HiddenCalls, "see"),
        "all": (torch_passes.Pass, "_see_call"),
    }
    if broken in parts:
        monkeypatch.setattr(*parts[broken], raises)
    if broken == "disk":
        monkeypatch.setattr(metrics, "append", raises)
        return folder / "metrics.jsonl"
    return raises if broken == "log" else None
