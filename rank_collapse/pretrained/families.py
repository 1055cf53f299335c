"""The table of families, and what is the same for all of them: settings, networks, weights."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained import (
    albert,
    bert,
    dinov2,
    distilbert,
    experts,
    gemma,
    gpt2,
    gpt_neox,
    llama,
    modernbert,
    olmo2,
    phi3,
    qwen,
    t5,
    vit,
    whisper,
    xlnet,
)
from rank_collapse.pretrained.checkpoint import Checkpoint, read_config
from rank_collapse.pretrained.family import Family, Settings, check_entry
from rank_collapse.pretrained.hub import hub_folder, is_hub_name
from rank_collapse.pretrained.live import LiveModel, is_model
from rank_collapse.pretrained.opened import OpenCheckpoint
from rank_collapse.pretrained.published import PUBLISHED
from rank_collapse.pretrained.weights import CheckpointWeights, RandomWeights

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        bert.BERT,
        bert.ROBERTA,
        bert.XLM_ROBERTA,
        bert.CAMEMBERT,
        albert.ALBERT,
        distilbert.DISTILBERT,
        xlnet.XLNET,
        t5.T5,
        t5.MT5,
        gpt2.GPT2,
        vit.VIT,
        llama.LLAMA,
        llama.MISTRAL,
        qwen.QWEN2,
        qwen.QWEN3,
        phi3.PHI3,
        gpt_neox.GPT_NEOX,
        olmo2.OLMO2,
        gemma.GEMMA2,
        gemma.GEMMA3,
        experts.MIXTRAL,
        experts.QWEN2_MOE,
        experts.QWEN3_MOE,
        modernbert.MODERNBERT,
        vit.DEIT,
        dinov2.DINOV2,
        dinov2.DINOV2_REGISTERS,
        whisper.WHISPER,
    )
}


# Models of images and text, of which the language model is read.
TEXT_PARTS = {"gemma3": "gemma3_text"}


def family_of(model_type: Any) -> Family:
    """The family of a `model_type`.

    Raises:
        ValueError: Not one of `FAMILIES`.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not one of {tuple(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def settings_of(source: Any, part: str | None = None) -> Settings:
    """The entries of a config.json, completed by the family's defaults.

    Args:
        source: The name of one of `PUBLISHED`, a checkpoint folder (a `Path` where it has such a
            name), "hf:" and a name on the hub (see `hub`), or a dictionary with the entries of a
            config.json, `model_type` among them.
        part: "encoder" or "decoder" of a model that has both (T5); its encoder by default.

    Raises:
        FileNotFoundError: No such folder, or no config.json in it.
        ValueError: An unknown model type, or a part that the model does not have.
    """
    if is_hub_name(source):
        source = hub_folder(source)
    if isinstance(source, dict):
        given = source
    elif source in PUBLISHED:
        given = PUBLISHED[source]
    else:
        given = read_config(source)
    model_type = given.get("model_type")
    if isinstance(model_type, str) and model_type in TEXT_PARTS:
        check_entry("text_config", given.get("text_config"), (dict,))
        given = given["text_config"] | {"model_type": TEXT_PARTS[model_type]}
    return family_of(given.get("model_type")).settings(given, part)


def config_of(source: Any, part: str | None = None) -> TransformerConfig:
    """The network that a folder, a published name or a config dictionary describes."""
    settings = settings_of(source, part)
    return family_of(settings["model_type"]).config(settings)


def load(
    folder: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """The network of a checkpoint folder, or of a model of `transformers`, with its weights.

    Heads and poolers are left aside. Weights are read once; the folder is only read.

    Args:
        folder: Holds config.json and model.safetensors, pytorch_model.bin, or shards of either.
            Or "hf:" and a name on the hub, or a model in memory, with the `config` and
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
    folder = hub_folder(folder) if is_hub_name(folder) else folder
    live = is_model(folder)
    # A path is never the name of a published model.
    settings = settings_of(folder.config.to_dict() if live else Path(folder), part)
    family = family_of(settings["model_type"])
    config = family.config(settings)
    tensors = LiveModel(folder) if live else Checkpoint(folder)
    weights = CheckpointWeights(tensors, family.anchors, dtype)
    return config, family.params(weights, settings, config)


def open_checkpoint(
    folder: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> OpenCheckpoint:
    """A checkpoint whose layers are read one by one, for models larger than memory.

    Every tensor's name and shape is checked here; values are read when `stream`, or
    `OpenCheckpoint.layer`, asks for them.

    Args:
        folder, part, dtype: As in `load`.

    Raises:
        FileNotFoundError, ValueError: As `load`, of any layer, before one is read.
    """
    folder = hub_folder(folder) if is_hub_name(folder) else folder
    live = is_model(folder)
    settings = settings_of(folder.config.to_dict() if live else Path(folder), part)
    family = family_of(settings["model_type"])
    tensors = LiveModel(folder) if live else Checkpoint(folder)
    return OpenCheckpoint(
        CheckpointWeights(tensors, family.anchors, dtype, lazy=True), family, settings
    )


def open_random(
    source: Any, key: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> OpenCheckpoint:
    """`random_like` whose layers are drawn one by one, with the same values.

    Args:
        source, key, part, dtype: As in `random_like`.
    """
    settings = settings_of(source, part)
    family = family_of(settings["model_type"])
    weights = RandomWeights(key, lambda name: family.draw(name, settings), dtype, lazy=True)
    return OpenCheckpoint(weights, family, settings)


def random_like(
    source: Any, key: Any, *, part: str | None = None, dtype: Any = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """The architecture of `source` at its own initialisation.

    Args:
        source: A checkpoint folder (its config.json alone is read), the name of one of
            `PUBLISHED`, or a dictionary with the entries of a config.json.
        key: Random key.
        part, dtype: As in `load`.

    Returns:
        (config, params).
    """
    settings = settings_of(source, part)
    family = family_of(settings["model_type"])
    config = family.config(settings)
    weights = RandomWeights(key, lambda name: family.draw(name, settings), dtype)
    return config, family.params(weights, settings, config)
