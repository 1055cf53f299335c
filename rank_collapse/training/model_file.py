"""Trained networks in one safetensors file: the weights by name, and the config as JSON.

    config, models = load_models("results/sort/a-run/models.safetensors")
    third = jax.tree.map(lambda a: a[2], models)
    trace = rc.apply(third.network, tokens, config)

Axis letters: s seeds.
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from rank_collapse.network.attention import Mixing
from rank_collapse.network.config import SWEPT, TransformerConfig, flat
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.network.gains import Gains
from rank_collapse.printed import one_line
from rank_collapse.runs.states import flatten, unflatten
from rank_collapse.struct import refuse_if
from rank_collapse.training.models import init_model
from rank_collapse.training.recipe import Recipe

_CONFIG, _SUM = "config", "sha256"  # of the metadata, and of the config in it


def dump_models(config: TransformerConfig | EncoderDecoderConfig, models: Any) -> bytes:
    """The file of an ensemble of one network, which other frameworks read as well.

    Its tensors are named by their path, as "network.layers.attention.w_q". The metadata have one
    entry, "config", since safetensors writes several in any order: the config's fields as JSON and,
    as "sha256", the checksum of these and of the weights.

    Args:
        config: The network, with an embedding.
        models: Weights with a leading seed axis [s, ...].

    Raises:
        ValueError: A config with a function of the caller's own, as `mix` or `normalise`.
    """
    text = json.dumps(_fields(config), default=lambda a: np.asarray(a).tolist())
    saved = flatten(models)
    sealed = json.dumps(json.loads(text) | {_SUM: _checksum(text, saved)})
    return safetensors.numpy.save(saved, metadata={_CONFIG: sealed})


def load_models(path: str | os.PathLike) -> tuple[Any, Any]:
    """(config, models [s, ...]) from a file of `dump_models`.

    A file without a checksum is read too; a models.npz, of versions before 0.2, is refused.

    Raises:
        ValueError: Not such a file, one that is not as it was written, or weights that do not fit
            the config.
        OSError: The file cannot be read.
    """
    try:
        fields, saved = _read(path)
        config = _config(fields)
        num_seeds = len(next(iter(saved.values())))
        both = isinstance(config, EncoderDecoderConfig)
        halves = (config.encoder, config.decoder) if both else (config,)
        most = max(max(array.shape) for array in saved.values())
        for half in halves:  # before anything is built for each layer
            refuse_if(half.num_rows > most, f"there are no weights of {half.num_rows} layers")
        outputs = halves[-1].embedding.vocab_size if both else saved["classifier.b"].shape[1]
        recipe = Recipe(config, outputs, batch_size=1, num_epochs=0)
        keys = jax.random.split(jax.random.key(0), num_seeds)
        like = jax.eval_shape(jax.vmap(lambda k: init_model(k, recipe)), keys)
    except OSError:
        raise
    except Exception as error:  # a config of a stranger's may be anything
        raise ValueError(
            f"{path} is not a file of trained models: {one_line(error, 200)}"
        ) from error
    return config, unflatten(saved, like, str(path))


def _read(path):
    """(fields of the config, {name: array})."""
    refuse_if(zipfile.is_zipfile(path), "it is an .npz of a version before 0.2; train again")
    with safetensors.safe_open(path, framework="numpy") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fields = json.loads((file.metadata() or {})[_CONFIG])
    found = fields.pop(_SUM, None)
    refuse_if(
        found is not None and found != _checksum(json.dumps(fields), saved),
        "its checksum is wrong: it is damaged",
    )
    return fields, saved


def _checksum(text, saved):
    """SHA-256 of the config and of the weights' names, shapes and bytes."""
    found = hashlib.sha256(text.encode())
    for name in sorted(saved):
        found.update(f"{name} {saved[name].dtype} {saved[name].shape}".encode())
        found.update(np.ascontiguousarray(saved[name]).tobytes())
    return found.hexdigest()


def _fields(config: Any) -> Any:
    """A config and its parts as dictionaries, the parts of a network in one."""
    if isinstance(config, TransformerConfig):
        for name, value in flat(config).items():
            if callable(value):
                raise ValueError(f"a file of trained models holds no function: {name}={value!r}")
        return {name: _fields(value) for name, value in flat(config).items()}
    if dataclasses.is_dataclass(config):
        return {f.name: _fields(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return config


def _config(fields: dict[str, Any]) -> TransformerConfig | EncoderDecoderConfig:
    if "encoder" in fields:
        halves = {name: _config(fields.pop(name)) for name in ("encoder", "decoder")}
        return EncoderDecoderConfig(**halves, **fields)

    def restored(name, value):
        if isinstance(value, dict):
            kind = Mixing if name == "mixing" else Gains
            return kind(**{part: restored(name, gain) for part, gain in value.items()})
        if isinstance(value, list):
            return jnp.asarray(value) if name in SWEPT else _tuples(value)
        return value

    embedding = fields.pop("embedding")
    fields = {name: restored(name, value) for name, value in fields.items()}
    return TransformerConfig(
        **fields, embedding=None if embedding is None else EmbeddingConfig(**embedding)
    )


def _tuples(value):
    """Lists of JSON as the tuples that they were, at every depth."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
