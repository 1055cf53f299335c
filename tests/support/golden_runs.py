"""Run folders made of the arrays that tests/golden/texts/runs has: nothing is compiled."""

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from experiments.lab import cli, provenance, run
from experiments.lab.experiment import import_experiment, read_run
from experiments.lab.flags import Mode
from tests.support.golden import TEXTS, list_other_arrays, read_arrays

# {experiment: arguments after those of the tiny size}: lists in no order, several points and
# networks, further layers and seeds, other branches.
WIDE = {
    "check_bounds": "--cases=8x16x2-padding,3x4x2 --sizes=1024,256",
    "run_architectures": "--models=xlnet-base-cased,albert-base-v2 --num_seeds=2",
    "run_circle": "--compare=theory --widths=6 --num_seeds=2",
    "run_collapse": "--variants=san_mlp,san --depth=3 --norm_placement=post,none "
    "--weight_scale=1,0.5 --skip_gain=1,0.5 --mlp_gain=2,1",
    "run_depth_check": "--rule=completep,sp --depth=4,1,2 --num_seeds=3 --steps=3",
    "run_lens": "--networks=llama,albert --start=0.5,0.13 --num_ranked=2",
    "run_lipschitz": "--networks=llama,albert --tokens=8,4,6",
    "run_loops": "--tied=false,true --gain_power=1,0.5 --depth=4,2 --num_seeds=3",
    "run_path_chains": "--depth=3 --skip_gain=1,0.5 --num_seeds=3 --num_paths=3 --num_repeats=2",
    "run_path_counts": "--heads=3,1,12 --layers=4,2,3",
    "run_sinks": "--start=0.4,0 --how=dropped,hidden --key=random,first --num_texts=4",
    "run_sort": "--depth=3 --path_len=1 --n_repeat=2 --num_seeds=3 --n_epochs=2",
    "run_stability": "--designs=pre,admin,post --depths=4,1,2 --num_seeds=3",
    "run_theorems": "--theorems=width,tied,first_mass,multi_head_energy",
    "run_trainability": "--depths=3,2 --designs=pre,admin,post --warmup=2,0 --n_steps=50 "
    "--num_seeds=3",
    "run_trained": "--networks=llama,albert",
    "run_transformer": "--depth=6 --num_seeds=3 --n_epochs=3 --min_len=2",
    "run_width": "--depths=4,1,2 --num_seeds=3",
}
MOST_ROWS = 60  # of a table that a text shows, at equal distances
ENVIRONMENT = {
    "python": "3.11.2",
    "platform": "Linux",
    "versions": {"jax": "0.10.2", "numpy": "2.4.0"},
    "backend": "cpu",
    "device": "cpu",
    "processor": "A processor, 2 cores",
    "num_devices": 2,
    "git": "0123456789abcdef0123456789abcdef01234567",
    "started": "2026-11-29 12:00:00",
}


def arrays_path(name: str, *, is_wide: bool = False) -> Path:
    """Returns the file with the arrays of an experiment."""
    return TEXTS / "runs" / f"{name}{'.wide' * is_wide}.arrays"


def check_arrays(name: str, measured: dict[str, np.ndarray], *, is_wide: bool = False) -> None:
    """Compares what an experiment measured with the arrays that are kept."""
    kept = read_arrays(arrays_path(name, is_wide=is_wide).read_text("utf-8"))
    differences = list_other_arrays(measured, kept)
    assert not differences, "\n".join(differences[:20])


def list_arguments(module: ModuleType, *, is_wide: bool = False) -> list[str]:
    """Lists the arguments of an experiment's tiny size, or those of `WIDE`, in one process."""
    further = WIDE[module.__name__.rpartition(".")[2]].split() if is_wide else []
    jobs = ["--jobs=1"] * ("jobs" in module.FLAGS)
    return [*module.EXPERIMENT.presets["tiny"], *further, *jobs]


def make_folder(name: str, folder: Path, *, is_wide: bool = False) -> None:
    """Makes the run folder of an experiment from the arrays that are kept, as of one machine."""
    module = import_experiment(name)
    arguments = list_arguments(module, is_wide=is_wide)
    options = cli.parse_flags(module.FLAGS, [*arguments, f"--output_dir={folder}"])
    arrays = read_arrays(arrays_path(name, is_wide=is_wide).read_text("utf-8"))
    options.mode = Mode(begin_with=arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "environment", lambda: dict(ENVIRONMENT))
        patch.setattr(run, "command_line", lambda: f"python -m experiments.{name}")
        module.main(options)


def describe_folder(name: str, folder: Path) -> dict[str, str]:
    """Writes all that a reader sees of a run folder, by its place."""
    head, *rows = (folder / "results.csv").read_text("utf-8").splitlines()
    shown = rows[:: math.ceil(len(rows) / MOST_ROWS) or 1]
    parts = {"results.csv": "\n".join([f"{len(rows)} rows", head, *shown])}
    for path in [folder / "summary.json", *folder.glob("figures/*.png")]:
        parts[path.relative_to(folder).as_posix()] = path.read_text("utf-8")
    finished = read_run(import_experiment(name), folder)
    parts["claims"] = "\n".join(f"{c.key} | {c.setting} | {c.estimate}" for c in finished.claims)
    parts["comparisons"] = "\n".join(
        f"{c.quantity} | {c.measured} | {c.published} | {c.note} | {c.source}"
        for c in finished.comparisons
    )
    parts["finding"] = str(finished.finding)
    return parts
