"""Every experiment at its tiny size: what it measures, and what it makes of that, are kept.

tests/golden/texts/runs has two files of each experiment: its arrays, and all that a reader sees of
them (lines, table, summary, figures, finding, claims). The second is made of the first, in a second
and without compiling, so that it is compared on every machine to rounding.
"""

import pytest

from experiments import reproduce
from experiments.lab.experiment import import_experiment, read_run
from tests.support import figures_as_data
from tests.support.golden import write_arrays
from tests.support.golden_runs import (
    WIDE,
    arrays_path,
    check_arrays,
    describe_folder,
    list_arguments,
    make_folder,
)
from tests.support.marks import full_but
from tests.support.runs import arrays, run

# Those whose arrays no cheaper test of the quick suite compares with independent numbers;
# `test_contract` compares run_sort's arrays, and `test_run_lipschitz` those of run_lipschitz.
QUICK = ("run_architectures", "run_loops", "run_sinks", "run_theorems")


@pytest.mark.parametrize("name", full_but(reproduce.EXPERIMENTS, *QUICK))
def test_golden_measurements(name, tmp_path, request):
    check_measurements(name, tmp_path, request)


@pytest.mark.full
@pytest.mark.parametrize("name", WIDE)
def test_golden_measurements_of_several_settings(name, tmp_path, request):
    check_measurements(name, tmp_path, request, is_wide=True)


def check_measurements(name, folder, request, *, is_wide=False):
    module, path = import_experiment(name), arrays_path(name, is_wide=is_wide)
    assert run(module, list_arguments(module, is_wide=is_wide), folder) == 0
    saved = arrays(folder) if (folder / "arrays.npz").exists() else {}
    if request.config.option.rewrite_golden:
        path.write_text(write_arrays(saved), "utf-8")
    check_arrays(name, saved, is_wide=is_wide)


@pytest.mark.parametrize("name", reproduce.EXPERIMENTS)
def test_golden_pictures_and_tables(name, tmp_path, capsys, golden):
    golden(f"runs/{name}.txt", describe_run(name, tmp_path, capsys))
    read_run(import_experiment(name), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert all("trained a WordPiece vocabulary" in line for line in lines), "only texts are named"


@pytest.mark.parametrize("name", WIDE)
def test_golden_pictures_of_several_settings(name, tmp_path, capsys, golden, monkeypatch):
    """Lists in no order, several points, networks and seeds: other branches than one setting."""
    monkeypatch.setattr(figures_as_data, "LAID_OUT", Everything())  # the tiny size lays out its own
    golden(f"runs/{name}.wide.txt", describe_run(name, tmp_path, capsys, is_wide=True))


class Everything(set):
    """Holds all figures."""

    def __contains__(self, _):
        return True


def describe_run(name, folder, capsys, *, is_wide=False):
    """Writes all that a reader sees of a run that is made of the arrays that are kept."""
    make_folder(name, folder, is_wide=is_wide)
    parts = {"printed": capsys.readouterr().out} | describe_folder(name, folder)
    text = "\n".join(f"== {part}\n{content}" for part, content in sorted(parts.items()))
    return text.replace(str(folder), "FOLDER")
