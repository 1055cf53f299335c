"""What can break while `watch` measures: its measures, its log, the disk."""

import pytest

pytest.importorskip("torch")

from rank_collapse.measures import table
from rank_collapse.torch import gradients, passes, products

BROKEN = ("measures", "products", "gradients", "all", "log", "disk")


def raises(*_, **__):
    raise OSError("no space left on device")


def breaking(broken, monkeypatch, folder):
    """Breaks one of `BROKEN`; returns `log=` of a watch."""
    if broken == "measures":
        for name in table.MEASURES:
            monkeypatch.setitem(table.MEASURES, name, raises)
    parts = {
        "products": (products, "rows_of"),
        "gradients": (gradients, "norms_of"),
        "all": (passes, "width_of"),
    }
    if broken in parts:
        monkeypatch.setattr(*parts[broken], raises)
    if broken == "disk":
        log = folder / "metrics.jsonl"
        log.symlink_to("/dev/full")
        return log
    return raises if broken == "log" else None
