"""The models of run_architectures, their inputs, and the residuals of one set of weights."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import rank_collapse as rc
from experiments.lab import JsonObject, Options, Progress, RunFolder, check_names, content_hash
from experiments.lab.text_inputs import encode_texts, join_texts
from rank_collapse import pretrained
from rank_collapse.network.measured.states import ProfilePass
from rank_collapse.network.surgery import list_ablations
from rank_collapse.pretrained import PUBLISHED
from rank_collapse.pretrained.checkpoint_files import open_weights
from rank_collapse.pretrained.loading import PREFIX, hub_folder, is_hub_name
from rank_collapse.pretrained.published import RANDOM, is_random_name
from rank_collapse.text import encoders, tokens as texts_of, words

NAMES = {"pretrained": "pretrained", "init": "random initialisation"}
Curves = Mapping[tuple[str, str], np.ndarray]  # {(variant, reading): [seeds, texts, L + 1]}
Results = Mapping[str, Mapping[str, Curves]]  # {model: {kind of weights: its curves}}


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture, and the tokens that it is measured on."""

    label: str
    source: str  # A folder, or "random:" and a name
    settings: JsonObject
    has_weights: bool
    inputs: dict[str, np.ndarray]  # x and mask of `rank_collapse.apply`, [b, n]

    @property
    def config(self) -> rc.TransformerConfig:
        """Returns the network."""
        return pretrained.config_of(self.settings)

    @property
    def ablations(self) -> list[tuple[str, str]]:
        """Lists (variant, reading) of all measurements."""
        return list(list_ablations(self.settings["model_type"]))


class Weights(NamedTuple):
    """One set of weights of a model."""

    model: Model
    kind: str  # One of `NAMES`
    seed: int  # Of an initialisation

    @property
    def name(self) -> str:
        """Names the part of the run that keeps its measurements."""
        return f"{self.model.label}/{self.kind}{self.seed}"


def make_models(options: Options) -> list[Model]:
    """Opens the folders and names of --checkpoints, or makes the published models.

    Args:
        options: The flags.

    Raises:
        FileNotFoundError, ValueError: A folder or texts that cannot be read.
    """
    models: list[Model] = []
    if not options.checkpoints:
        check_names(options, "models", PUBLISHED)
    names = options.checkpoints or [f"{RANDOM}{name}" for name in options.models]
    for name in names:
        label, folder = Path(name.removeprefix(RANDOM)).name, name
        if is_hub_name(name):
            label, folder = name.rsplit("/", 1)[-1].removeprefix(PREFIX), hub_folder(name)
        label += "+" * sum(model.label.rstrip("+") == label for model in models)
        settings = pretrained.settings_of(folder)
        if not pretrained.config_of(settings).embedding.vocab_size:
            raise ValueError(f"{label} is a {settings['model_type']}, which reads no tokens")
        model = Model(label, str(folder), settings, not is_random_name(name), {})
        models.append(dataclasses.replace(model, inputs=read_inputs(model, options)))
    return models


def read_inputs(model: Model, options: Options) -> dict[str, np.ndarray]:
    """Reads the tokens of the flags' texts, as arguments of `rank_collapse.apply`: x and mask.

    Args:
        model: Model that reads the tokens.
        options: The flags.

    Raises:
        FileNotFoundError, ValueError: A file that is missing, empty or does not suit the model.
    """
    names = ("num_positions", "vocab_size")
    limits = {name: getattr(model.config.embedding, name) for name in names}
    if options.token_ids:
        ids = texts_of.read_ids(options.token_ids, options.num_texts)
        most = min(options.max_tokens, limits["num_positions"] or options.max_tokens)
        tokens = texts_of.pad_sequences(
            [row[:most] for row in ids], vocab_size=limits["vocab_size"]
        )
    else:
        if options.text:
            texts = texts_of.read_texts(options.text)
        else:
            texts = words.cut_windows(words.default_text(), options.num_texts, options.max_tokens)
        if not model.has_weights:
            encoder = encoders.trained_tokenizer(texts, limits["vocab_size"])
        elif (encoder := encoders.load_tokenizer(model.source, model.settings)) is None:
            raise ValueError(f"{model.source} has none of {encoders.FILES}; pass --token_ids")
        if options.join:
            texts = join_texts(texts, encoder, options.max_tokens, options.num_texts)
        few = texts[: options.num_texts]
        tokens = encode_texts(few, encoder, max_tokens=options.max_tokens, **limits)
    if int(tokens.lengths.min()) < 2:
        raise ValueError(f"text {int(tokens.lengths.argmin())} has fewer than 2 tokens")
    return {"x": tokens.ids, "mask": tokens.mask}


def identity(models: Sequence[Model]) -> dict[str, str]:
    """Returns what identifies inputs and models, for the run's config.

    Weight files are identified by name, size and time of change; their content is not read.

    Args:
        models: The models.
    """
    entries = [open_weights(m.source).entries.values() for m in models if m.has_weights]
    files = sorted({entry.path for group in entries for entry in group})
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    settings = json.dumps([m.settings for m in models] + stats, sort_keys=True, default=str)
    inputs = b"".join(a.tobytes() for m in models for a in m.inputs.values())
    return {
        "settings": content_hash(settings.encode()),
        "inputs": content_hash(inputs),
    }


def list_weights(options: Options, models: Sequence[Model]) -> list[Weights]:
    """Lists the sets of weights to measure: for each model its checkpoint, if it has one, then a
    random initialisation for each seed.

    Args:
        options: The flags.
        models: The models.
    """
    weights = []
    seeds = range(options.first_seed, options.first_seed + options.num_seeds)
    for model in models:
        weights += [Weights(model, "pretrained", 0)] * model.has_weights
        if options.initialisation or not model.has_weights:
            weights += [Weights(model, "init", seed) for seed in seeds]
    return weights


def measure(options: Options, models: Sequence[Model], folder: RunFolder) -> Results:
    """Measures the residual ratio by layer of every set of weights, resumed from the run.

    All texts go through a layer together, since a model may be larger than memory; a run resumes
    after the last set of weights that is complete.

    Args:
        options: The flags.
        models: The models.
        folder: The run folder; results that it already holds are not computed again.
    """
    sets = list_weights(options, models)
    by_label: dict[str, dict[str, list[dict[str, np.ndarray]]]] = {m.label: {} for m in models}
    with Progress(len(sets), "architectures", log=folder.log) as progress:
        for weights in sets:
            if folder.part(weights.name) is None:
                progress.say(weights.name)
            arrays = folder.cached(weights.name, partial(measure_weights, options, weights))
            by_label[weights.model.label].setdefault(weights.kind, []).append(arrays)
            progress.advance()

    def stack_weights(arrays, ablation):
        """Stacks the residual ratios of several sets of weights."""
        name = f"{ablation_name(ablation)}/residual_ratio"
        return np.stack([weights[name] for weights in arrays])

    results: Results = {}
    for model in models:
        results[model.label] = {
            kind: {ablation: stack_weights(arrays, ablation) for ablation in model.ablations}
            for kind, arrays in by_label[model.label].items()
        }
    return results


def ablation_name(ablation: tuple[str, str]) -> str:
    """Names the arrays of a variant and its reading."""
    return "/".join(("residuals", *ablation))


def measure_weights(options: Options, weights: Weights) -> dict[str, np.ndarray]:
    """Measures one model with one set of weights, whole and without some of its parts (ablations).

    Args:
        options: The flags.
        weights: The model, and its weights: pretrained, or drawn from a seed.

    Returns:
        {"residuals/ablation/reading/residual_ratio": [texts, L + 1]}. An ablation has two readings:
        as the published code computes it, or as the paper's text says.
    """
    model = weights.model
    if weights.kind == "pretrained":
        source = pretrained.open_checkpoint(model.source)
    else:
        key = jax.random.fold_in(jax.random.key(options.seed), weights.seed)
        source = pretrained.open_random(model.settings, key)
    states = (("residuals", ProfilePass(("residual_ratio",))),)
    groups = {
        ablation_name(ablation): pretrained.Group(states, pretrained.AblationSpec(*ablation))
        for ablation in model.ablations
    }
    streamed = pretrained.stream(source, model.inputs, groups, chunk=options.chunk)
    return {
        f"{name}/residual_ratio": values["residuals"]["residual_ratio"]
        for name, values in streamed.items()
    }
