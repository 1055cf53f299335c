"""Points of a grid, here, by workers, and joined from several folders: one result."""

import pytest
from trained_runs import arrays, run, same_arrays

from experiments import join, run_path_chains as path_chains
from experiments.lab import cli

TINY = [*path_chains.EXPERIMENT.presets["tiny"], "--num_devices=1", "--jobs=1"]
GAINS = "--skip_gain=0.5,1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(path_chains, [*TINY, GAINS], folder) == 0
    return folder


def test_workers_measure_what_one_process_does(whole, tmp_path):
    assert run(path_chains, [*TINY, GAINS, "--jobs=2"], tmp_path) == 0
    same_arrays(whole, tmp_path)
    assert (tmp_path / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    assert not (tmp_path / "points").exists()
    assert {name.split("/")[0] for name in arrays(tmp_path)} == {"skip_gain=0.5", "skip_gain=1.0"}


@pytest.mark.parametrize(
    "parts",
    [
        ([GAINS, "--num_seeds=1"], [GAINS, "--num_seeds=1", "--first_seed=1"]),
        (["--skip_gain=0.5"], ["--skip_gain=1"]),
    ],
)
def test_folders_of_seeds_or_of_points_join_to_the_whole(parts, whole, tmp_path):
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, own in zip(folders, parts, strict=True):
        assert run(path_chains, [*TINY, *own], folder) == 0
    joined = tmp_path / "joined"
    assert (
        cli.execute(
            join.main, join.FLAGS, [*folders, f"--output_dir={joined}"], positional="folders"
        )
        == 0
    )
    same_arrays(whole, joined)
    assert (joined / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["--num_seeds=1", "--num_seeds=1 --first_seed=2"], "seed 1 is in none"),
        (["--depth=1", "--depth=2 --skip_gain=0.5"], "are not all of the grid"),
    ],
)
def test_what_is_no_whole_is_refused(parts, message, tmp_path, capsys):
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, own in zip(folders, parts, strict=True):
        assert run(path_chains, [*TINY, *own.split()], folder) == 0
    capsys.readouterr()
    arguments = [*folders, f"--output_dir={tmp_path / 'joined'}"]
    assert cli.execute(join.main, join.FLAGS, arguments, positional="folders") == 2
    assert message in capsys.readouterr().err
