"""The files of a training run beside its arrays: weights, and lines of --monitor."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from experiments.shell.flag_values import Flags
from experiments.trained import arguments
from rank_collapse.runs import metrics, processes
from rank_collapse.runs.folder import RunFolder
from rank_collapse.training import model_file
from rank_collapse.training.recipe import Recipe

ALONE = "results"  # the part of the arrays of a run that trains one network


@dataclass
class Kept:
    """What is kept of the seeds of one network.

    Attributes:
        options: Flags.
        recipe: What is trained.
        run: The run folder.
        part: Of the run's arrays that is the network's.
        again: Whether all seeds are trained again for these files alone.
    """

    options: Flags
    recipe: Recipe
    run: RunFolder
    part: str = ALONE
    again: bool = False
    _weights: Any = None

    @property
    def models(self) -> str:
        """Where --keep_models writes the weights: of several networks a file for each."""
        return "models.safetensors" if self.part == ALONE else f"models/{self._name}.safetensors"

    @property
    def lines(self) -> str:
        """Where --monitor writes its lines."""
        return metrics.NAME if self.part == ALONE else f"{metrics.FOLDER}/{self._name}.jsonl"

    @property
    def _name(self):
        return re.sub("[^A-Za-z0-9=+]+", "-", self.part)

    @property
    def monitored(self) -> bool:
        """Whether the lines are asked for."""
        return arguments.monitored(self.options)

    def seeds(self) -> dict[str, int]:
        """{file that is asked for: of how many of the first seeds it holds all}."""
        found, (weights, lines) = {}, (self.run.path / own for own in (self.models, self.lines))
        if self.options.keep_models:
            there = jax.tree.leaves(model_file.load_models(weights)[1] if weights.exists() else ())
            found[self.models] = len(there[0]) if there else 0
        if self.monitored:
            rows = metrics.read(lines) if lines.exists() else []
            ended = {r.get("seed") for r in rows if r["step"] == self.recipe.num_epochs}
            found[self.lines] = next(seed for seed in itertools.count() if seed not in ended)
        return {name: int(processes.from_primary(np.asarray(n))) for name, n in found.items()}

    def keep_weights(self, first: int, weights: Any) -> None:
        """Writes the weights of seeds `first` and on, after those of the seeds before.

        Where all are trained again the file is written when it is whole.
        """
        if not self.run.primary:
            return
        if first and self._weights is None:
            before = model_file.load_models(self.run.path / self.models)[1]
            self._weights = jax.tree.map(lambda a: np.asarray(a[:first]), before)
        if first:
            weights = jax.tree.map(lambda *a: np.concatenate(a), self._weights, weights)
        self._weights = weights
        if not self.again or len(jax.tree.leaves(weights)[0]) == self.options.num_seeds:
            data = model_file.dump_models(self.recipe.config, weights)
            self.run.write_file(self.models, data)
