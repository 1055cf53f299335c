"""The models that run_architectures measures, and their weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from absl import flags

import rank_collapse as rc
from rank_collapse import pretrained
from rank_collapse.measures import profiles
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
    sources = options.checkpoints or options.models
    if not options.checkpoints:
        unknown = [m for m in options.models if m not in pretrained.PUBLISHED]
        if unknown or not sources:
            known = ", ".join(pretrained.PUBLISHED)
            raise ValueError(f"--models={','.join(options.models)} is not out of {known}")
    models, labels = [], set()
    for source in sources:
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
    """One set of weights of a model, read when first asked for: a run may hold all it measures.

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
        self.config, self.family = model.config, model.family
        self._batch, self._params, self._memory = batch, None, None

    @property
    def name(self) -> str:
        """Where the run keeps what is measured on them."""
        return f"{self.model.label}/{self.kind}{self.seed}"

    @property
    def params(self) -> rc.TransformerParams:
        """The parameters."""
        if self._params is None:
            self._params = self._read(self.model.settings.get("part"))
        return self._params

    def inputs(self, count: int | None = None) -> dict[str, Any]:
        """The batch, or its first texts; with the encoder's output for a decoder."""
        batch = dict(self._batch)
        if self.config.cross_attention:
            if self._memory is None:
                self._memory = self._encoded()
            batch |= {"memory": self._memory, "memory_mask": batch["mask"]}
        return {k: v if v is None else v[:count] for k, v in batch.items()}

    def _read(self, part):
        if self.kind == "pretrained":
            return pretrained.load(self.model.source, part=part)[1]
        key = jax.random.fold_in(jax.random.key(self.options.seed), self.seed)
        settings = {k: v for k, v in self.model.settings.items() if k != "part"}
        return pretrained.random_like(settings, key, part=part)[1]

    def _encoded(self):
        config = pretrained.config_of(self.model.settings, "encoder")
        params, chunk = self._read("encoder"), self.options.chunk
        return profiles.measure_batch(_output, params, config, self._batch, chunk=chunk)


def _output(params, x, config, mask=None):
    """What a decoder looks at."""
    return rc.apply(params, x, config, mask=mask).output
