"""The models that run_architectures measures, and their weights."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax

import rank_collapse as rc
from experiments.shell.flag_values import Flags, check_names
from rank_collapse import pretrained
from rank_collapse.network.passes import Output
from rank_collapse.pretrained.hub import PREFIX, hub_folder, is_hub_name


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture: a folder, or the name of a published one."""

    label: str
    source: str
    settings: dict[str, Any]
    has_weights: bool

    @property
    def family(self) -> str:
        """The `model_type` of the checkpoint."""
        return self.settings["model_type"]

    @property
    def config(self) -> rc.TransformerConfig:
        """The network."""
        return pretrained.config_of(self.settings, self.settings.get("part"))


def models_of(options: Flags) -> list[Model]:
    """The folders of --checkpoints, or the published models.

    Raises:
        FileNotFoundError, ValueError: See `pretrained.settings_of`.
    """
    if not options.checkpoints:
        check_names(options, "models", pretrained.PUBLISHED)
        named = {name: pretrained.settings_of(name) for name in options.models}
        return [Model(name, name, settings, False) for name, settings in named.items()]
    models: list[Model] = []
    for source in options.checkpoints:
        label, folder = Path(source).resolve().name, Path(source)
        if is_hub_name(source):
            label, folder = source.rsplit("/", 1)[-1].removeprefix(PREFIX), hub_folder(source)
        while any(label == model.label for model in models):
            label += "+"
        settings = pretrained.settings_of(folder)
        if "part" in settings:
            settings["part"] = options.part
        models.append(Model(label, str(folder), settings, True))
    return models


def weights_of(model: Model, options: Flags) -> list[tuple[str, int]]:
    """(kind of weights, seed): the checkpoint, then its initialisations."""
    jobs = [("pretrained", 0)] if model.has_weights else []
    if options.initialisation or not model.has_weights:
        jobs += [("init", seed) for seed in range(options.num_seeds)]
    return jobs


@dataclasses.dataclass(frozen=True)
class Weights:
    """One set of weights of a model, opened when first asked for."""

    model: Model
    kind: str  # "pretrained" or "init"
    seed: int  # Of an initialisation
    options: Flags
    batch: dict[str, Any]  # What the model is measured on, from `inputs.inputs_of`

    @property
    def name(self) -> str:
        """Where the run keeps what is measured on them."""
        return f"{self.model.label}/{self.kind}{self.seed}"

    @functools.cached_property
    def source(self) -> pretrained.OpenCheckpoint:
        """The weights, layer by layer."""
        return self._open(self.model.settings.get("part"))

    def inputs(self) -> dict[str, Any]:
        """The batch, with the encoder's output for a decoder."""
        if not self.model.config.cross_attention:
            return self.batch
        groups = {"encoder": pretrained.Group((("output", Output()),))}
        encoder, chunk = self._open("encoder"), self.options.chunk
        memory = pretrained.stream(encoder, self.batch, groups, chunk=chunk)["encoder"]["output"]
        return self.batch | {"memory": memory, "memory_mask": self.batch["mask"]}

    def _open(self, part):
        dtype = self.options.dtype
        if self.kind == "pretrained":
            return pretrained.open_checkpoint(self.model.source, part=part, dtype=dtype)
        key = jax.random.fold_in(jax.random.key(self.options.seed), self.seed)
        settings = {k: v for k, v in self.model.settings.items() if k != "part"}
        return pretrained.open_random(settings, key, part=part, dtype=dtype)
