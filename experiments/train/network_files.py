"""Files of trained networks in a run folder: weights, and metrics by epoch."""

import re
from collections.abc import Mapping

import jax
import numpy as np

from experiments.lab import Options, Point, RunFolder
from experiments.train import arguments
from experiments.train.trained_tasks import ALONE, TrainedTask
from rank_collapse.runs import metrics
from rank_collapse.runs.states import unflatten_state
from rank_collapse.training import dump_models
from rank_collapse.training.models import init_model
from rank_collapse.training.recipe import run_config


def network_file(cell: str, name: str) -> str:
    """Names a file of one network: "models.safetensors" of the only one, else
    "models/<its part and point>.safetensors"."""
    stem, ending = name.split(".")
    network = re.sub(r"[^A-Za-z0-9=.+]+", "-", cell.removesuffix(ALONE)).strip("-")
    return f"{stem}/{network}.{ending}" if network else name


def check_files(options: Options, part: str, folder: RunFolder) -> None:
    """Refuses to keep weights or lines that networks trained earlier did not write.

    Args:
        options: The flags.
        part: Part of the arrays of the run.
        folder: The run folder; results that it already holds are not computed again.

    Raises:
        ValueError: Weights or lines are requested that an earlier run did not write.
    """
    is_monitored = "monitor" in options and options.monitor
    lines = folder.path / network_file(options.prefix + part, metrics.NAME)
    for flag, is_wanted, is_present in (
        ("keep_models", options.keep_models, folder.part(f"{part}/model")),
        ("monitor", is_monitored, lines.exists()),
    ):
        if is_wanted and folder.part(part) and not is_present:
            raise ValueError(
                f"{folder.path} was trained without --{flag}: --overwrite trains again"
            )


def save_models(point: Point, tasks: Mapping[str, TrainedTask]) -> None:
    """Saves trained weights as files of a run, if the run kept them.

    Args:
        point: Measured point of the run.
        tasks: The trained tasks, as in `train_networks`.
    """
    for part, task in tasks.items():
        name = network_file(task.options.prefix + part, "models.safetensors")
        weights = point.folder.part(f"{part}/model")
        if weights and point.lacks_file(name):
            point.save_file(name, dump_weights(task, weights))


def dump_weights(task: TrainedTask, weights: Mapping[str, np.ndarray]) -> bytes:
    """Writes weights {name: [s, ...]} as `rank_collapse.training.load_models` reads them."""
    keys = jax.random.split(jax.random.key(0), len(next(iter(weights.values()))))
    like = jax.eval_shape(jax.vmap(lambda key: init_model(key, task.recipe)), keys)
    config = run_config(task.recipe, arguments.make_hyper(task.options, task.floats))
    return dump_models(config, unflatten_state(weights, like, "the run"))
