"""Files of trained networks: their names, and weights or lines that an earlier run lacks."""

from types import SimpleNamespace

import pytest

from experiments.train.train_networks import check_files, network_file
from experiments.train.trained_tasks import ALONE
from tests.support.refusals import is_refused


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (ALONE, "models.safetensors"),
        ("", "models.safetensors"),
        ("depth=2, rate=1e-3/sorting", "models/depth=2-rate=1e-3-sorting.safetensors"),
        ("../a b", "models/..-a-b.safetensors"),
    ],
)
def test_a_network_has_a_file_and_several_have_a_folder(cell, expected):
    assert network_file(cell, "models.safetensors") == expected


class Options(SimpleNamespace):
    def __contains__(self, name):
        return hasattr(self, name)


def check(tmp_path, parts, **flags):
    folder = SimpleNamespace(path=tmp_path, part=parts.get)
    check_files(Options(prefix="", **flags), "sort", folder)


@pytest.mark.parametrize("flags", [{"keep_models": True}, {"keep_models": False, "monitor": True}])
def test_what_an_earlier_run_did_not_write_is_named(tmp_path, flags):
    flag = "monitor" if "monitor" in flags else "keep_models"
    message = f"was trained without --{flag}: --overwrite trains again"
    is_refused(message, check, tmp_path, {"sort": {"loss": 1}}, **flags)
    check(tmp_path, {}, **flags)  # nothing was trained


def test_what_is_there_is_kept(tmp_path):
    parts = {"sort": {"loss": 1}, "sort/model": {"w": 1}}
    check(tmp_path, parts, keep_models=True, monitor=False)
    file = tmp_path / network_file("sort", "metrics.jsonl")
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    check(tmp_path, parts, keep_models=True, monitor=True)
