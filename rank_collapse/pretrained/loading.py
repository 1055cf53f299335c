"""Networks and their weights: from folders, names on the Hugging Face hub, models, and configs.

Only the names on the hub need the package huggingface_hub.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp

from rank_collapse.annotations import DType, Key
from rank_collapse.checks import refuse_if
from rank_collapse.extras import import_package
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained.checkpoint_files import (
    WEIGHT_FILES,
    is_model,
    live_model,
    open_weights,
    read_config,
)
from rank_collapse.pretrained.entries import Entry, Settings, check_entry
from rank_collapse.pretrained.families import find_family
from rank_collapse.pretrained.opened import OpenCheckpoint
from rank_collapse.pretrained.published import PUBLISHED, RANDOM, is_random_name
from rank_collapse.pretrained.random_weights import RandomWeights
from rank_collapse.pretrained.weights import CheckpointWeights
from rank_collapse.printed import format_one_line

# Models of images and text, of which the language model is read.
TEXT_PARTS = {"gemma3": "gemma3_text"}


def settings_of(source: object, part: str | None = None) -> Settings:
    """Read the entries of a config.json, completed by the family's defaults.

    Args:
        source: A checkpoint folder; "hf:" and a name on the hub, see `hub_folder`; "random:" and
            the name of one of `PUBLISHED`, of a folder or of a model on the hub, whose architecture
            then gets random weights; or a dictionary with the entries of a config.json, including
            `model_type`.
        part: "encoder" or "decoder" of a model that has both (T5); its encoder by default.

    Raises:
        FileNotFoundError: No such folder, or no config.json in it.
        ValueError: An unknown model type, or a part that the model does not have.
    """
    is_published = is_random_name(source) and source.removeprefix(RANDOM) in PUBLISHED
    if is_random_name(source):
        source = source.removeprefix(RANDOM)
        refuse_if(not source, f"{RANDOM} has no name: {RANDOM}{' or '.join(PUBLISHED)}")
    if is_hub_name(source):
        source = hub_folder(source)
    if not isinstance(source, dict | str | os.PathLike):
        raise ValueError(
            f"a {type(source).__name__} is not a checkpoint folder, a config dictionary or a model "
            "of transformers with .config and .state_dict(); for other models, rc.profile measures "
            "hidden states"
        )
    if isinstance(source, dict):
        config_json = source
    elif is_published:
        config_json = PUBLISHED[source]
    else:
        config_json = read_config(source)
    model_type = config_json.get("model_type")
    if isinstance(model_type, str) and model_type in TEXT_PARTS:
        check_entry("text_config", config_json.get("text_config"), Entry(None, (dict,)))
        config_json = config_json["text_config"] | {"model_type": TEXT_PARTS[model_type]}
    return find_family(config_json.get("model_type")).complete_settings(config_json, part)


def config_of(source: object, part: str | None = None) -> TransformerConfig:
    """Return the network that a folder, a published name or a config dictionary describes.

    Args:
        source, part: See `settings_of`.
    """
    settings = settings_of(source, part)
    return find_family(settings["model_type"]).make_config(settings)


def load(
    folder: object, *, part: str | None = None, dtype: DType = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """Load the network of a checkpoint folder, or of a model of `transformers`, with its weights.

    Heads and poolers are not read. Weights are read once; the folder is not changed.

    Args:
        folder: Holds config.json and model.safetensors, pytorch_model.bin, or shards of either.
            Or "hf:" and a name on the hub; "random:" and a name, whose weights are drawn by the
            first key, `jax.random.key(0)`; or a model in memory, with the `config` and
            `state_dict()` of `transformers`.
        part: "encoder" or "decoder" of a model that has both; its encoder by default.
        dtype: Dtype of the parameters.

    Returns:
        (config, params), as `rank_collapse.apply` takes them.

    Raises:
        FileNotFoundError: A folder or file that does not exist.
        ValueError: A file cut short, a tensor missing or of another shape than the config
            implies, an unknown model type or an unsupported variant.
    """
    weights, family, settings = _read_checkpoint(folder, part, dtype, lazy=False)
    config = family.make_config(settings)
    return config, family.read_params(weights, settings, config)


def open_checkpoint(
    folder: object, *, part: str | None = None, dtype: DType = jnp.float32
) -> OpenCheckpoint:
    """Open a checkpoint whose layers are read one by one, for models larger than memory.

    Weights outside of the layers are read here. The weights of a layer are checked and read when
    `stream`, or `OpenCheckpoint.layer`, asks for them.

    Args:
        folder, part, dtype: See `load`.

    Raises:
        FileNotFoundError, ValueError: In the same cases as `load`; for a layer, when it is read.
    """
    return OpenCheckpoint(*_read_checkpoint(folder, part, dtype, lazy=True))


def open_random(
    source: object, key: Key, *, part: str | None = None, dtype: DType = jnp.float32
) -> OpenCheckpoint:
    """Open `random_like` with layers that are drawn one by one, with the same values.

    Args:
        source, key, part, dtype: See `random_like`.
    """
    return OpenCheckpoint(*_draw_random(source, key, part, dtype, lazy=True))


def random_like(
    source: object, key: Key, *, part: str | None = None, dtype: DType = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """Draw the architecture of `source` at its own initialisation: (config, params).

    Args:
        source: See `settings_of`; of a checkpoint folder its config.json alone is read.
        key: JAX key of all weights.
        part, dtype: See `load`.
    """
    weights, family, settings = _draw_random(source, key, part, dtype, lazy=False)
    config = family.make_config(settings)
    return config, family.read_params(weights, settings, config)


def _read_checkpoint(folder, part, dtype, *, lazy):
    """Return (weights, family, settings) of a folder, a name on the hub or a model in memory.

    Args:
        folder, part, dtype: See `load`.
        lazy: Whether layers stay on disk.
    """
    if is_random_name(folder):
        return _draw_random(folder, jax.random.key(0), part, dtype, lazy=lazy)
    tensors = None
    if is_model(folder):
        folder_or_config, tensors = folder.config.to_dict(), live_model(folder)
    elif is_hub_name(folder):
        folder_or_config = hub_folder(folder)
    else:
        folder_or_config = folder
    settings = settings_of(folder_or_config, part)
    family = find_family(settings["model_type"])
    family.make_config(settings)  # refuses an unsupported network before weights are opened
    if tensors is None:
        tensors = open_weights(folder_or_config)
    tied = settings.get("tie_word_embeddings") is True
    return CheckpointWeights(tensors, family.anchors, dtype, lazy=lazy, tied=tied), family, settings


def _draw_random(source, key, part, dtype, *, lazy):
    """Return (weights, family, settings) of an architecture at its own initialisation.

    Args:
        source, key, part, dtype: See `random_like`.
        lazy: Whether layers are drawn one by one.
    """
    settings = settings_of(source, part)
    family = find_family(settings["model_type"])
    weights = RandomWeights(key, lambda name: family.tensor_law(name, settings), dtype, lazy=lazy)
    return weights, family, settings


PREFIX = "hf:"
# What a model and its tokenizer are read from; weights in the safer format where there are both.
_BESIDE = [
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece*",
]
_WEIGHTS = (["model*.safetensors", "*.safetensors.index.json"], ["pytorch_model*.bin*"])


def is_hub_name(source: object) -> bool:
    """Check whether a source is "hf:owner/name" or "hf:owner/name@revision", no folder."""
    return isinstance(source, str) and source.startswith(PREFIX)


def hub_folder(source: str) -> Path:
    """Find the folder of a model of the hub, in the local cache or downloaded.

    Args:
        source: "hf:gpt2", "hf:EleutherAI/pythia-70m@step1000" with a branch, tag or commit.

    Raises:
        FileNotFoundError: No such model, no internet or no weights; the message says how to get a
            folder.
        MissingPackage: No huggingface_hub.
    """
    name, _, revision = source.removeprefix(PREFIX).partition("@")
    at = f" --revision {revision}" if revision else ""
    instead = (
        "give a folder instead: on a machine with internet, "
        f"hf download {name}{at} --local-dir {name.rsplit('/', 1)[-1]}"
    )
    hub = import_package("huggingface_hub", source, "hub", instead)
    for weights in _WEIGHTS:
        try:
            folder = hub.snapshot_download(
                name, revision=revision or None, allow_patterns=_BESIDE + weights
            )
        except Exception as error:  # of several HTTP libraries; none is ours to handle
            raise FileNotFoundError(f"{source}: {format_one_line(error, 120)}; {instead}") from None
        folder = Path(folder)
        if any((folder / file).is_file() for file in WEIGHT_FILES):
            return folder
    raise FileNotFoundError(f"{source}: there are none of {', '.join(WEIGHT_FILES)}")
