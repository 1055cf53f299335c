"""The models that run_architectures measures, and their weights."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from absl import flags

import rank_collapse as rc
from experiments.shell.flag_values import check_names
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


def models_of(options: flags.FlagValues) -> list[Model]:
    """The folders of --checkpoints, or the published models.

    Raises:
        FileNotFoundError, ValueError: See `pretrained.settings_of`.
    """
    if not options.checkpoints:
        check_names(options, "models", pretrained.PUBLISHED)
    models, labels = [], set()
    for source in options.checkpoints or options.models:
        has_weights = bool(options.checkpoints)
        label = Path(source).resolve().name if has_weights else source
        if has_weights and is_hub_name(source):
            label, source = source.rsplit("/", 1)[-1].removeprefix(PREFIX), str(hub_folder(source))
        while label in labels:
            label += "+"
        labels.add(label)
        settings = pretrained.settings_of(Path(source) if has_weights else source)
        if "part" in settings:
            settings["part"] = options.part
        models.append(Model(label, source, settings, has_weights))
    return models


def weights_of(model: Model, options: flags.FlagValues) -> list[tuple[str, int]]:
    """(kind of weights, seed): the checkpoint, then its initialisations."""
    jobs = [("pretrained", 0)] if model.has_weights else []
    if options.initialisation or not model.has_weights:
        jobs += [("init", seed) for seed in range(options.num_seeds)]
    return jobs


class Weights:
    """One set of weights of a model, opened when first asked for.

    Args:
        model: The architecture.
        kind: "pretrained" or "init".
        seed: Of an initialisation.
        options: The flags.
        batch: What the model is measured on, from `inputs.inputs_of`.
    """

    def __init__(
        self, model: Model, kind: str, seed: int, options: flags.FlagValues, batch: dict[str, Any]
    ):
        self.model, self.kind, self.seed, self.options = model, kind, seed, options
        self.config, self.family, self._batch = model.config, model.family, batch

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
        batch = dict(self._batch)
        if self.config.cross_attention:
            groups = {"encoder": pretrained.Group((("output", Output()),))}
            chunk = self.options.chunk
            found = pretrained.stream(self._open("encoder"), batch, groups, chunk=chunk)
            batch |= {"memory": found["encoder"]["output"], "memory_mask": batch["mask"]}
        return batch

    def _open(self, part):
        dtype = self.options.dtype
        if self.kind == "pretrained":
            return pretrained.open_checkpoint(self.model.source, part=part, dtype=dtype)
        key = jax.random.fold_in(jax.random.key(self.options.seed), self.seed)
        settings = {k: v for k, v in self.model.settings.items() if k != "part"}
        return pretrained.open_random(settings, key, part=part, dtype=dtype)
