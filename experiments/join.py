"""Joins run folders of one experiment that differ in seeds, or in points of a grid, to one folder.

    python -m experiments.run_collapse --num_seeds=8 --output_dir=a
    python -m experiments.run_collapse --num_seeds=8 --first_seed=8 --output_dir=b
    python -m experiments.join a b --output_dir=whole

The whole is what one command for all of it leaves: its arrays, table, figures and statements.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab import cli, vocabulary
from experiments.lab.experiment import experiment_of, experiments_of
from experiments.lab.flags import Flags, config_of, options_of
from experiments.lab.folder import read_summary
from rank_collapse.runs.files import load_arrays, read_object

FLAGS = cli.bare_flags(Flags("join"))
vocabulary.define(FLAGS, output_dir=None, overwrite=False)
cli.definer(FLAGS)("list", "folders", [], "Finished run folders, also as arguments.")
SEEDS = ("first_seed", "num_seeds")
Arrays = Mapping[str, np.ndarray]


def main(options: Flags) -> int:
    if len(options.folders) < 2 or not options.output_dir:
        raise ValueError("join takes two folders or more, and --output_dir for the whole")
    folders = [Path(folder) for folder in options.folders]
    name = read_object(folders[0] / "config.json").get("config", {}).get("experiment")
    known = (experiment_of(module) for module in experiments_of())
    own = next((e for e in known if e.flags.experiment == name), None)
    if own is None:
        raise ValueError(f"{folders[0]} is of no experiment: {name!r}")
    found: dict[str, list[tuple[Mapping[str, Any], Arrays]]] = {}
    for folder in folders:
        for config, arrays in points_of(own.flags, folder):
            rest = {n: v for n, v in config.items() if n not in SEEDS}
            found.setdefault(json.dumps(rest, sort_keys=True), []).append((config, arrays))
    points = [seeds_joined(parts) for parts in found.values()]
    whole = options_of(own.flags, folders[0], {})
    for flag, value in {n: points[0][0][n] for n in SEEDS if n in whole}.items():
        whole[flag].value = value
    whole.output_dir, whole.overwrite = options.output_dir, options.overwrite
    vars(whole)["axes"] = axes_of([config for config, _ in points], whole)
    places = [(config_of(point), point.prefix) for point in whole.points()]
    with own.opened(whole, own.setup(whole.points()[0])) as run:
        run.save_arrays(
            {
                f"{prefix}{array}": values
                for config, arrays in points
                for at, prefix in places
                if all(config[flag] == at[flag] for flag in whole.axes)
                for array, values in arrays.items()
            }
        )
    whole.overwrite = False
    return own.main(whole)


def points_of(flag_values: Flags, folder: Path) -> list[tuple[dict[str, Any], Arrays]]:
    """(what determines the results, arrays) of each point of a finished run.

    Raises:
        RunError: The run is not complete, or damaged.
    """
    read_summary(folder)
    config = read_object(folder / "config.json")["config"]
    points = options_of(copy.deepcopy(flag_values), folder, {}).points()
    arrays = load_arrays(folder / "arrays.npz")
    found = []
    for point in points:
        own = {n: v for n, v in (config | config_of(point)).items() if n != "axes"}
        start = point.prefix
        parts = {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}
        found.append((own, parts))
    return found


def seeds_joined(parts: Sequence[tuple[Mapping[str, Any], Arrays]]) -> tuple[dict, Arrays]:
    """Runs of other seeds of one point as one.

    Raises:
        ValueError: Seeds are missing or there twice, or an array is not of the seeds.
    """
    if len(parts) == 1:
        return dict(parts[0][0]), parts[0][1]
    parts = sorted(parts, key=lambda part: part[0]["first_seed"])
    whole, total = dict(parts[0][0]), 0
    for config, _ in parts:
        if config["first_seed"] != whole["first_seed"] + total:
            raise ValueError(f"seed {whole['first_seed'] + total} is in none, or in two of them")
        total += config["num_seeds"]
    for config, arrays in parts:
        for name, values in arrays.items():
            if np.shape(values)[:1] != (config["num_seeds"],):
                raise ValueError(f"{name} of shape {np.shape(values)} is not of the seeds")
    names = parts[0][1]
    joined = {name: np.concatenate([arrays[name] for _, arrays in parts]) for name in names}
    return whole | {"num_seeds": total}, joined


def axes_of(configs: Sequence[Mapping[str, Any]], options: Flags) -> dict[str, list[str]]:
    """The flags in which points differ, with their values as they are written.

    Raises:
        ValueError: They differ in what is no axis, or are no grid.
    """
    values = {n: list(dict.fromkeys(json.dumps(c.get(n)) for c in configs)) for n in configs[0]}
    axes = {name: own for name, own in values.items() if len(own) > 1}
    for name, own in axes.items():
        single = name in options and type(options[name].parser) in vocabulary.SINGLE
        if not single or name in SEEDS:
            raise ValueError(f"the folders differ in {name}: {' and '.join(own)}")
    if math.prod(map(len, axes.values())) != len(configs):
        raise ValueError(f"{len(configs)} points are not all of the grid of {', '.join(axes)}")
    return {name: [str(json.loads(text)) for text in own] for name, own in axes.items()}


if __name__ == "__main__":
    cli.run(main, FLAGS, positional="folders")
