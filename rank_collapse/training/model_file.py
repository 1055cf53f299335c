"""Trained networks in one safetensors file: the weights by name, and the config as JSON.

    config, models = load_models("results/sort/a-run/models.safetensors")
    third = jax.tree.map(lambda a: a[2], models)
    trace = rc.apply(third.network, tokens, config)

Axis letters: s seeds.
"""

import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from rank_collapse.network.attention_config import Mixing
from rank_collapse.network.config import SWEPT, TransformerConfig, flat
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.network.residual import Gains
from rank_collapse.printed import format_one_line
from rank_collapse.runs.states import flatten_state, unflatten_state
from rank_collapse.training.models import Model, init_model
from rank_collapse.training.recipe import Recipe


def dump_models(
    config: TransformerConfig | EncoderDecoderConfig, models: Model | EncoderDecoderParams
) -> bytes:
    """Save an ensemble of one network as a file that other frameworks read as well.

    Its tensors are named by their path, as "network.layers.attention.w_q"; its metadata have the
    config's fields as JSON under "config".

    Args:
        config: The network, with an embedding.
        models: Weights with a leading seed axis [s, ...].

    Raises:
        ValueError: A config with a function of the caller's own, as `mix` or `normalise`.
    """
    text = json.dumps(_config_fields(config), default=lambda a: np.asarray(a).tolist())
    return safetensors.numpy.save(flatten_state(models), metadata={"config": text})


def load_models(
    path: str | os.PathLike,
) -> tuple[TransformerConfig | EncoderDecoderConfig, Model | EncoderDecoderParams]:
    """Load (config, models [s, ...]) from a file of `dump_models`.

    Raises:
        ValueError: Not such a file, one that is not as it was written, or weights that do not fit
            the config.
        OSError: The file cannot be read.
    """
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, not a file of trained models")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            config = _restore_config(json.loads(file.metadata()["config"]))
        is_pair = isinstance(config, EncoderDecoderConfig)
        num_outputs = (
            config.decoder.embedding.vocab_size if is_pair else arrays["classifier.b"].shape[-1]
        )
        recipe = Recipe(config, num_outputs, batch_size=1, num_epochs=0)
        keys = jax.random.split(jax.random.key(0), len(next(iter(arrays.values()))))
        like = jax.eval_shape(jax.vmap(lambda key: init_model(key, recipe)), keys)
    except OSError:
        raise
    except Exception as error:  # any other file
        reason = format_one_line(error, 200)
        raise ValueError(f"{path} is not a file of trained models: {reason}") from error
    return config, unflatten_state(arrays, like, str(path))


def _config_fields(config: Any) -> Any:
    """Convert a config and its parts to dictionaries, the parts of a network in one."""
    if isinstance(config, TransformerConfig):
        for name, value in flat(config).items():
            if callable(value):
                raise ValueError(f"a file of trained models holds no function: {name}={value!r}")
        return {name: _config_fields(value) for name, value in flat(config).items()}
    if dataclasses.is_dataclass(config):
        return {f.name: _config_fields(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return config


def _restore_config(fields: dict[str, Any]) -> TransformerConfig | EncoderDecoderConfig:
    """Restore a config from the dictionaries of `_config_fields`, as JSON has them."""
    if "encoder" in fields:
        halves = {name: _restore_config(fields.pop(name)) for name in ("encoder", "decoder")}
        return EncoderDecoderConfig(**halves, **fields)

    def restore_value(name, value):
        """Converts a JSON value of a field back to gains, arrays or tuples."""
        if isinstance(value, dict):
            kind = Mixing if name == "mixing" else Gains
            return kind(**{part: restore_value(name, gain) for part, gain in value.items()})
        if isinstance(value, list):
            return jnp.asarray(value) if name in SWEPT else _as_tuples(value)
        return value

    embedding = fields.pop("embedding")
    fields = {name: restore_value(name, value) for name, value in fields.items()}
    return TransformerConfig(
        **fields, embedding=None if embedding is None else EmbeddingConfig(**embedding)
    )


def _as_tuples(value):
    """Convert lists of JSON to the tuples that they were, at every depth."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
