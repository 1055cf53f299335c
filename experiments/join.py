"""Joins run folders of one experiment that differ in seeds, or in points of a grid, to one folder.

    python -m experiments.run_collapse --num_seeds=8 --output_dir=a
    python -m experiments.run_collapse --num_seeds=8 --first_seed=8 --output_dir=b
    python -m experiments.join a b --output_dir=whole

The new folder has the arrays, table, figures and statements that one command for all seeds would
have written.
"""

import copy
import importlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from absl import flags

from experiments.lab import (
    Flags,
    JsonObject,
    Mode,
    Run,
    RunFolder,
    cli,
    list_points,
    pool,
    provenance,
    read_config,
    read_flags,
    read_summary,
    shared_flags,
)
from rank_collapse.runs.files import damaged_file_error, read_object

FLAGS = cli.bare_flags(Flags("join"))
shared_flags.define(FLAGS, output_dir=None, overwrite=False)
flags.DEFINE_list(  # not FLAGS.define, with which a folder that is named twice would count once
    "folders", [], "Finished run folders, also as arguments.", flag_values=FLAGS
)
SEEDS = ("first_seed", "num_seeds")


class Part(NamedTuple):
    """One point of a finished run: the settings that determine its results, and its arrays by
    name."""

    config: JsonObject
    arrays: Mapping[str, np.ndarray]


def main(options: Flags) -> Run:
    """Joins the folders, and publishes the joined run as its experiment does.

    Raises:
        ValueError: Fewer than two folders, an --output_dir that is missing or is one of them, or
            folders that do not make a full run.
        RunError: A folder that is not complete, damaged, or of another version.
    """
    if len(options.folders) < 2 or not options.output_dir:
        raise ValueError("join needs two folders or more, and --output_dir for the joined run")
    folders = [Path(folder) for folder in options.folders]
    if Path(options.output_dir).resolve() in [folder.resolve() for folder in folders]:
        raise ValueError(f"--output_dir={options.output_dir} is one of the folders")
    module = common_module(folders)
    groups: dict[str, list[Part]] = {}
    for folder in folders:
        for part in read_parts(module.FLAGS, folder):
            other_flags = {name: v for name, v in part.config.items() if name not in SEEDS}
            groups.setdefault(json.dumps(other_flags, sort_keys=True), []).append(part)
    parts = [join_seeds(group) for group in groups.values()]
    # Without these flags, cells that no folder has would be trained.
    shown_flags = read_summary(folders[0]).get("shown", {})
    joined_flags = read_flags(module.FLAGS, folders[0], shown_flags)
    for name in SEEDS:
        if name in parts[0].config:
            joined_flags[name].value = parts[0].config[name]
    axes = find_axes([part.config for part in parts], joined_flags)
    joined_flags.axes = axes
    joined_flags.output_dir, joined_flags.overwrite = options.output_dir, options.overwrite
    by_values = {tuple(str(part.config[name]) for name in axes): part for part in parts}
    arrays = {}
    for point in list_points(joined_flags):
        part = by_values[tuple(str(point[name]) for name in axes)]
        arrays |= {point.prefix + name: array for name, array in part.arrays.items()}
    contents = [read_object(folder / "config.json") for folder in folders]
    origins = [e for content in contents for e in provenance.list_environments(content)]
    joined_flags.mode = Mode(begin_with=arrays, begun_in=origins)
    return module.main(joined_flags)


def common_module(folders: Sequence[Path]) -> ModuleType:
    """Imports the module of the experiment that all folders are of.

    Args:
        folders: Run folders.

    Raises:
        ValueError: A folder is named twice or holds no experiment, or folders hold different
            experiments.
    """
    for folder, other in itertools.combinations(folders, 2):
        if folder.resolve() == other.resolve():
            raise ValueError(f"{other} is given twice")
    names = {folder: read_config(folder).get("experiment") for folder in folders}
    first = names[folders[0]]
    for folder, name in names.items():
        if name != first:
            raise ValueError(
                f"{folder} holds a run of {name!r}, but {folders[0]} holds a run of {first!r}"
            )
    return importlib.import_module(pool.module_name(first))


def read_parts(flag_values: Flags, folder: Path) -> list[Part]:
    """Reads the points of a finished run.

    Args:
        flag_values: Flag values of the run's experiment.
        folder: The run folder.

    Raises:
        RunError: The run is not complete, damaged, or of another version.
    """
    read_summary(folder)
    config = read_config(folder)
    if config.get("until"):
        raise ValueError(
            f"{folder} was measured with --until={config['until']} and cannot be joined: a larger "
            "--max_seeds adds seeds to it"
        )
    run = RunFolder(folder, config, read_only=True)
    parts = []
    for point in list_points(read_flags(copy.deepcopy(flag_values), folder, {})):
        arrays = run.at(point.prefix).arrays
        if not arrays:
            raise damaged_file_error(
                folder / "arrays.npz", f"it has no arrays of {point.prefix or 'the run'}"
            )
        point_config = {name: v for name, v in config.items() if name != "axes"} | point.axes
        parts.append(Part(point_config, arrays))
    return parts


def join_seeds(parts: Sequence[Part]) -> Part:
    """Joins runs of other seeds of one point.

    Args:
        parts: The parts, which differ only in their seeds.

    Raises:
        ValueError: Seeds are missing or repeated, or arrays do not have an axis of seeds.
    """
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: part.config["first_seed"])
    first, total = parts[0], 0
    for config, arrays in parts:
        expected = first.config["first_seed"] + total
        if config["first_seed"] != expected:
            raise ValueError(f"seed {expected} is in none of the folders, or in two of them")
        total += config["num_seeds"]
        if arrays.keys() != first.arrays.keys():
            name = min(arrays.keys() ^ first.arrays.keys())
            raise ValueError(f"{name} is not among the arrays of all folders")
        for name, values in arrays.items():
            if np.shape(values)[:1] != (config["num_seeds"],):
                raise ValueError(
                    f"{name} of shape {np.shape(values)} does not have the seeds as its first axis"
                )
    joined = {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays}
    return Part({**first.config, "num_seeds": total}, joined)


def find_axes(configs: Sequence[JsonObject], options: Flags) -> dict[str, list[str]]:
    """Lists the values of the flags in which points differ, as they are written.

    Args:
        configs: The settings that determine the results of each point.
        options: Flags of the experiment.

    Raises:
        ValueError: They differ in a flag that is not an axis, or do not form a grid.
    """
    names = dict.fromkeys([*options.axes, *configs[0]])  # axes in the order of the first folder

    def list_values(name):
        """Lists the different values of a flag, as JSON."""
        return list(dict.fromkeys(json.dumps(config.get(name)) for config in configs))

    values = {name: list_values(name) for name in names}
    axes = {name: texts for name, texts in values.items() if len(texts) > 1}
    if not all(map(options.takes_several, axes)):
        differences = [f"{name}: {' and '.join(texts)}" for name, texts in axes.items()]
        raise ValueError(f"the folders differ in {'; '.join(differences)}")
    if math.prod(map(len, axes.values())) != len(configs):
        raise ValueError(
            f"the folders hold {len(configs)} points, which do not fill a grid of {', '.join(axes)}"
        )
    return {name: [str(json.loads(text)) for text in texts] for name, texts in axes.items()}


if __name__ == "__main__":
    cli.run(main, FLAGS, positional="folders")
