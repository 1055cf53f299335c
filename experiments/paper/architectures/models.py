"""The models that run_architectures measures, their weights, and their inputs of any kind."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rank_collapse as rc
from experiments.lab import cli
from experiments.lab.flags import Flags, check_names
from rank_collapse import pretrained
from rank_collapse.network.passes import Output
from rank_collapse.pretrained.checkpoint import Checkpoint
from rank_collapse.pretrained.hub import PREFIX, hub_folder, is_hub_name
from rank_collapse.text import encoders, tokens as texts_of, words


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


def weights_of(model: Model, options: Flags, batch: dict[str, Any]) -> list[Weights]:
    """The checkpoint, then its initialisations."""
    sets = [("pretrained", 0)] * model.has_weights
    if options.initialisation or not model.has_weights:
        sets += [("init", seed) for seed in range(options.num_seeds)]
    return [Weights(model, kind, seed, options, batch) for kind, seed in sets]


def inputs_of(model: Model, options: Flags) -> dict[str, Any]:
    """The batch a model is measured on, as arguments of `rank_collapse.apply`: x and mask.

    Raises:
        FileNotFoundError, ValueError: A file that is missing, empty or does not suit the model.
    """
    embedding = model.config.embedding
    if embedding.convolutions:
        return {"x": features_of(model, options), "mask": None}
    if embedding.d_input:
        images = _array("images", model, options)
        return {"x": pretrained.image_patches(images, model.settings), "mask": None}
    most, vocab_size = embedding.num_positions, embedding.vocab_size
    if options.token_ids:
        sequences = texts_of.read_ids(options.token_ids, options.num_texts)
        longest = max(map(len, sequences))
        if most and longest > most:
            raise ValueError(
                f"{options.token_ids}: a text of {longest} tokens is longer than the {most} "
                f"positions of {model.label}"
            )
        tokens = texts_of.pad([s[: options.max_tokens] for s in sequences], vocab_size=vocab_size)
    else:
        tokens = tokens_of(model, options)
    if int(tokens.lengths.min()) < 2:
        raise ValueError(f"text {int(tokens.lengths.argmin())} has fewer than 2 tokens")
    return {"x": tokens.ids, "mask": tokens.mask}


def tokens_of(model: Model, options: Flags) -> texts_of.Tokens:
    """The texts of the flags as this model's tokens."""
    names = ("num_positions", "vocab_size")
    limits = {name: getattr(model.config.embedding, name) for name in names}
    if options.text_file:
        texts = texts_of.read_texts(options.text_file, options.columns)
    else:
        texts = words.windows(words.default_text(), options.num_texts, options.max_tokens)
    if not model.has_weights:
        encoder = encoders.trained_tokenizer(texts, limits["vocab_size"])
    elif (encoder := encoders.tokenizer_of(model.source, model.settings)) is None:
        raise ValueError(f"{model.source} has none of {encoders.FILES}; pass --token_ids")
    if options.join:
        texts = texts_of.join(texts, encoder, options.max_tokens, options.num_texts)
    few = texts[: options.num_texts]
    return texts_of.encode(few, encoder, max_tokens=options.max_tokens, **limits)


def features_of(model: Model, options: Flags) -> np.ndarray:
    """Spectrograms as frames [b, frames, mel bins], from [b, mel bins, frames]."""
    features, bins = _array("features", model, options), model.config.embedding.d_input
    frames = 2 * model.config.embedding.num_positions
    if features.ndim != 3 or features.shape[1:] != (bins, frames) or not len(features):
        raise ValueError(f"features of shape {features.shape} are not [b, {bins}, {frames}]")
    return features.transpose(0, 2, 1)


def _array(name, model, options):
    """The first --num_texts of a flag's .npy file, in float32."""
    path = options[name].value
    if path is None:
        raise ValueError(f"{model.label} is a {model.family}: give --{name}=FILE.npy")
    if not Path(path).is_file():
        raise FileNotFoundError(f"--{name}={path} does not exist")
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError):
        found = None
    if not isinstance(found, np.ndarray) or found.ndim == 0 or found.dtype.kind not in "fiu":
        raise ValueError(f"--{name}={path} is not a .npy file of an array of numbers")
    found = found.astype(np.float32)
    if not np.isfinite(found).all():
        raise ValueError(f"--{name}={path} holds values that are not finite")
    return found[: options.num_texts]


def identity(models: list[Model], batches: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What identifies inputs and models, for the run's config."""
    digest = b"".join(v.tobytes() for b in batches.values() for v in b.values() if v is not None)
    settings = json.dumps([m.settings for m in models], sort_keys=True, default=str).encode()
    found = {"inputs": digest, "settings": settings}
    if weights := [weights_identity(Path(m.source)) for m in models if m.has_weights]:
        found["weights"] = json.dumps(weights).encode()
    return {name: cli.content_hash(value) for name, value in found.items()}


def weights_identity(folder: Path) -> list[Any]:
    """Commit (of a model of the hub) and name, size and time of change in ns of all weight files.

    They are not read through: a large model's would take as long as measuring it. A copy that
    keeps times, or a folder that is moved, is the same.

    Raises:
        FileNotFoundError, ValueError: See `Checkpoint`.
    """
    commit = folder.name if folder.parent.name == "snapshots" else ""
    files = [(path.name, path.stat()) for path in Checkpoint(folder).paths]
    return [commit, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]
