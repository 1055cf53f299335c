"""What the models of run_architectures are measured on: texts as tokens, images, spectrograms."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.architectures.models import Model
from experiments.shell import cli
from experiments.shell.flag_values import Flags
from rank_collapse import pretrained
from rank_collapse.pretrained.checkpoint import Checkpoint
from rank_collapse.text import encoders, tokens as texts_of, words


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
