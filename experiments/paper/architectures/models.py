"""The models of run_architectures, their inputs, and the residuals of one set of weights."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import rank_collapse as rc
from experiments.lab import cli
from experiments.lab.flags import Flags, check_names
from experiments.lab.folder import RunFolder
from experiments.lab.progress import Progress
from rank_collapse import pretrained
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.surgery import list_ablations
from rank_collapse.pretrained import PUBLISHED
from rank_collapse.pretrained.checkpoint import open_weights
from rank_collapse.pretrained.hub import PREFIX, hub_folder, is_hub_name
from rank_collapse.text import encoders, tokens as texts_of, words

NAMES = {"pretrained": "pretrained", "init": "random initialisation"}


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture, and the tokens that it is measured on."""

    label: str
    source: str  # A folder, or the name of a published model
    settings: dict[str, Any]
    has_weights: bool
    inputs: dict[str, Any]  # x and mask of `rank_collapse.apply`, [b, n]

    @property
    def config(self) -> rc.TransformerConfig:
        """The network."""
        return pretrained.config_of(self.settings)

    @property
    def ablations(self) -> list[tuple[str, str]]:
        """(variant, reading) of all that are measured."""
        return list(list_ablations(self.settings["model_type"]))


class Weights(NamedTuple):
    """One set of weights of a model."""

    model: Model
    kind: str  # One of `NAMES`
    seed: int  # Of an initialisation

    @property
    def name(self) -> str:
        """Where the run keeps what is measured on them."""
        return f"{self.model.label}/{self.kind}{self.seed}"


def models_of(options: Flags) -> list[Model]:
    """The folders of --checkpoints, or the published models.

    Raises:
        FileNotFoundError, ValueError: A folder or texts that cannot be read.
    """
    found: list[Model] = []
    if not options.checkpoints:
        check_names(options, "models", PUBLISHED)
    for source in options.checkpoints or options.models:
        label, folder = Path(source).name, source
        if is_hub_name(source):
            label, folder = source.rsplit("/", 1)[-1].removeprefix(PREFIX), hub_folder(source)
        label += "+" * sum(model.label.rstrip("+") == label for model in found)
        given = Path(folder) if options.checkpoints else folder
        settings = pretrained.settings_of(given)
        if not pretrained.config_of(settings).embedding.vocab_size:
            raise ValueError(f"{label} is a {settings['model_type']}, which reads no tokens")
        model = Model(label, str(given), settings, bool(options.checkpoints), {})
        found.append(dataclasses.replace(model, inputs=inputs_of(model, options)))
    return found


def inputs_of(model: Model, options: Flags) -> dict[str, Any]:
    """The tokens of the flags' texts, as arguments of `rank_collapse.apply`: x and mask.

    Raises:
        FileNotFoundError, ValueError: A file that is missing, empty or does not suit the model.
    """
    names = ("num_positions", "vocab_size")
    limits = {name: getattr(model.config.embedding, name) for name in names}
    if options.token_ids:
        most, ids = options.max_tokens, texts_of.read_ids(options.token_ids, options.num_texts)
        most = min(most, limits["num_positions"] or most)
        tokens = texts_of.pad_sequences(
            [row[:most] for row in ids], vocab_size=limits["vocab_size"]
        )
    else:
        if options.text_file:
            texts = texts_of.read_texts(options.text_file, options.columns)
        else:
            texts = words.cut_windows(words.default_text(), options.num_texts, options.max_tokens)
        if not model.has_weights:
            encoder = encoders.trained_tokenizer(texts, limits["vocab_size"])
        elif (encoder := encoders.load_tokenizer(model.source, model.settings)) is None:
            raise ValueError(f"{model.source} has none of {encoders.FILES}; pass --token_ids")
        if options.join:
            texts = texts_of.join_texts(texts, encoder, options.max_tokens, options.num_texts)
        few = texts[: options.num_texts]
        tokens = texts_of.encode_texts(few, encoder, max_tokens=options.max_tokens, **limits)
    if int(tokens.lengths.min()) < 2:
        raise ValueError(f"text {int(tokens.lengths.argmin())} has fewer than 2 tokens")
    return {"x": tokens.ids, "mask": tokens.mask}


def identity(models: Sequence[Model]) -> dict[str, str]:
    """What identifies inputs and models, for the run's config.

    Weight files by name, size and time of change: they are not read through.
    """
    entries = [open_weights(m.source).entries.values() for m in models if m.has_weights]
    files = sorted({entry.path for own in entries for entry in own})
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    settings = json.dumps([m.settings for m in models] + stats, sort_keys=True, default=str)
    found = {"settings": settings.encode()}
    found["inputs"] = b"".join(a.tobytes() for m in models for a in m.inputs.values())
    return {name: cli.content_hash(value) for name, value in found.items()}


def weights_of(options: Flags, models: Sequence[Model]) -> list[Weights]:
    """Of each model the checkpoint, then its initialisations."""
    found = []
    for model in models:
        found += [Weights(model, "pretrained", 0)] * model.has_weights
        if options.initialisation or not model.has_weights:
            found += [Weights(model, "init", seed) for seed in range(options.num_seeds)]
    return found


def measure_all(options: Flags, models: Sequence[Model], run: RunFolder) -> dict[str, np.ndarray]:
    """{"label/kind and seed/residuals/variant/reading/residual_ratio": [texts, L + 1]}.

    All texts go through a layer together, since a model may be larger than memory; a run resumes
    after the last set of weights that is complete.
    """
    sets = weights_of(options, models)
    with Progress(len(sets), "architectures", log=run.log) as progress:
        for weights in sets:
            if run.part(weights.name) is None:
                progress.say(weights.name)
                run.cached(weights.name, partial(measure, options, weights))
            progress.advance()
    return dict(run.arrays)


def measure(options: Flags, weights: Weights) -> dict[str, np.ndarray]:
    """{"residuals/variant/reading/residual_ratio": [texts, L + 1]} of one set of weights."""
    model = weights.model
    if weights.kind == "pretrained":
        source = pretrained.open_checkpoint(model.source)
    else:
        key = jax.random.fold_in(jax.random.key(options.seed), weights.seed)
        source = pretrained.open_random(model.settings, key)
    states = (("residuals", ProfilePass(("residual_ratio",))),)
    groups = {
        "/".join(("residuals", *own)): pretrained.Group(states, pretrained.AblationSpec(*own))
        for own in model.ablations
    }
    found = pretrained.stream(source, model.inputs, groups, chunk=options.chunk)
    return {f"{n}/residual_ratio": own["residuals"]["residual_ratio"] for n, own in found.items()}
