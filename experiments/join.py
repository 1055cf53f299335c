"""Joins run folders of one experiment that differ in seeds, or in points of a grid, to one folder.

    python -m experiments.run_collapse --num_seeds=8 --output_dir=a
    python -m experiments.run_collapse --num_seeds=8 --first_seed=8 --output_dir=b
    python -m experiments.join a b --output_dir=whole

The whole is what one command for all of it leaves: its arrays, table, figures and statements.
"""

import copy
import importlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from experiments.lab import cli, pool, vocabulary
from experiments.lab.experiment import Shown
from experiments.lab.flags import ONE_VALUE, Flags, make_config, read_flags
from experiments.lab.folder import RunFolder, read_config, read_summary
from rank_collapse.runs.files import damaged

FLAGS = cli.bare_flags(Flags("join"))
vocabulary.define(FLAGS, output_dir=None, overwrite=False)
cli.definer(FLAGS)("list", "folders", [], "Finished run folders, also as arguments.")
SEEDS = ("first_seed", "num_seeds")


class Part(NamedTuple):
    """One point of a finished run: what determines its results, and its arrays by name."""

    config: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


def main(options: Flags) -> Shown:
    """Joins the folders, and shows the whole as its experiment does."""
    if len(options.folders) < 2 or not options.output_dir:
        raise ValueError("join takes two folders or more, and --output_dir for the whole")
    folders = [Path(folder) for folder in options.folders]
    module = common_module(folders)
    groups: dict[str, list[Part]] = {}
    for folder in folders:
        for part in parts_of(module.FLAGS, folder):
            apart = {name: value for name, value in part.config.items() if name not in SEEDS}
            groups.setdefault(json.dumps(apart, sort_keys=True), []).append(part)
    points = [join_seeds(parts) for parts in groups.values()]
    whole = whole_options(module.FLAGS, folders[0], [point.config for point in points])
    whole.output_dir, whole.overwrite = options.output_dir, options.overwrite
    arrays = {}
    for place in whole.points():
        config = make_config(place)
        for point in points:
            if all(point.config[flag] == config[flag] for flag in whole.axes):
                arrays |= {place.prefix + name: array for name, array in point.arrays.items()}
    vars(whole)["begin_with"] = arrays
    return module.main(whole)


def common_module(folders: Sequence[Path]) -> ModuleType:
    """Imports the module of the experiment that all folders are of.

    Raises:
        ValueError: One folder twice, of no experiment, or of several.
    """
    for one, other in itertools.combinations(folders, 2):
        if one.resolve() == other.resolve():
            raise ValueError(f"{other} is there twice")
    names = {folder: read_config(folder).get("experiment") for folder in folders}
    first = names[folders[0]]
    for folder, name in names.items():
        if name != first:
            raise ValueError(f"{folder} is of {name!r}, {folders[0]} of {first!r}")
    return importlib.import_module(pool.module_name(first))


def parts_of(flag_values: Flags, folder: Path) -> list[Part]:
    """Reads the points of a finished run.

    Raises:
        RunError: The run is not complete, damaged, or of another version.
    """
    read_summary(folder)
    config = read_config(folder)
    arrays = RunFolder(folder, config, read_only=True).arrays
    points = read_flags(copy.deepcopy(flag_values), folder, {}).points()
    parts = []
    for point in points:
        own = {name: v for name, v in (config | make_config(point)).items() if name != "axes"}
        start = point.prefix
        parts.append(
            Part(own, {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)})
        )
        if not parts[-1].arrays:
            raise damaged(folder / "arrays.npz", f"it has no arrays of {start or 'the run'}")
    return parts


def join_seeds(parts: Sequence[Part]) -> Part:
    """Joins runs of other seeds of one point.

    Raises:
        ValueError: Seeds are missing or there twice, or arrays are not of the seeds.
    """
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: part.config["first_seed"])
    first, total = parts[0], 0
    for config, arrays in parts:
        expected = first.config["first_seed"] + total
        if config["first_seed"] != expected:
            raise ValueError(f"seed {expected} is in none, or in two of the folders")
        total += config["num_seeds"]
        if arrays.keys() != first.arrays.keys():
            name = min(arrays.keys() ^ first.arrays.keys())
            raise ValueError(f"{name} is not among the arrays of all folders")
        for name, values in arrays.items():
            if np.shape(values)[:1] != (config["num_seeds"],):
                raise ValueError(f"{name} of shape {np.shape(values)} is not of the seeds")
    joined = {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays}
    return Part({**first.config, "num_seeds": total}, joined)


def whole_options(flag_values: Flags, folder: Path, configs: Sequence[Mapping[str, Any]]) -> Flags:
    """Makes the flags of the command for all points.

    Raises:
        ValueError: Points differ in what is no axis, or are no grid.
    """
    whole = read_flags(flag_values, folder, {})
    for name in SEEDS:
        if name in configs[0]:
            whole[name].value = configs[0][name]
    vars(whole)["axes"] = axes_of(configs, whole)
    return whole


def axes_of(configs: Sequence[Mapping[str, Any]], options: Flags) -> dict[str, list[str]]:
    """Lists the values of the flags in which points differ, as they are written.

    Raises:
        ValueError: They differ in what is no axis, or are no grid.
    """
    values = {n: list(dict.fromkeys(json.dumps(c.get(n)) for c in configs)) for n in configs[0]}
    axes = {name: texts for name, texts in values.items() if len(texts) > 1}
    apart = [f"{name}: {' and '.join(texts)}" for name, texts in axes.items()]
    if any(name in ONE_VALUE or not options.takes_several(name) for name in axes):
        raise ValueError(f"the folders differ in {'; '.join(apart)}")
    if math.prod(map(len, axes.values())) != len(configs):
        raise ValueError(f"{len(configs)} points are not all of the grid of {', '.join(axes)}")
    return {name: [str(json.loads(text)) for text in texts] for name, texts in axes.items()}


if __name__ == "__main__":
    cli.run(main, FLAGS, positional="folders")
