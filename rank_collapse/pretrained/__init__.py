"""Pretrained architectures as configurations of the one network.

`load(folder)` reads a checkpoint folder as Hugging Face saves it; `random_like` gives the same
architecture at its own initialisation. One file per family maps its names and shapes.
"""

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained import albert, bert, distilbert, gpt2, llama, t5, vit, xlnet
from rank_collapse.pretrained.checkpoint import Checkpoint, read_config
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.pretrained.weights import CheckpointWeights, RandomWeights

FAMILIES = {
    "bert": bert,
    "roberta": bert,
    "xlm-roberta": bert,
    "camembert": bert,
    "albert": albert,
    "distilbert": distilbert,
    "xlnet": xlnet,
    "t5": t5,
    "mt5": t5,
    "gpt2": gpt2,
    "vit": vit,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
}

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "config_of",
    "load",
    "published_curves",
    "random_like",
    "settings_of",
]


def settings_of(source: Any, part: str | None = None) -> dict[str, Any]:
    """The entries of a config.json, completed by the family's defaults.

    Args:
        source: The name of one of `PUBLISHED`, a checkpoint folder (a `Path` where it has such a
            name), or a dictionary with the entries of a config.json, `model_type` among them.
        part: "encoder" or "decoder" of a model that has both (T5); its encoder by default.

    Raises:
        FileNotFoundError: No such folder, or no config.json in it.
        ValueError: An unknown model type, or a part that the model does not have.
    """
    if isinstance(source, dict):
        given = source
    elif source in PUBLISHED:
        given = PUBLISHED[source]
    else:
        given = read_config(source)
    kind = given.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not one of {tuple(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    defaults = getattr(family, f"{kind.upper()}_DEFAULTS", family.DEFAULTS)
    if kind in bert.ROBERTA_TYPES:
        defaults = bert.ROBERTA_DEFAULTS
    parts = getattr(family, "PARTS", ())
    if part is not None and part not in parts:
        raise ValueError(f"part={part!r} of a {kind} model is not one of {parts}")
    # An entry that is null in the file means the default, as it does where it was written.
    given = {k: v for k, v in given.items() if v is not None or k not in defaults}
    return defaults | given | ({"part": part or parts[0]} if parts else {})


def config_of(source: Any, part: str | None = None) -> TransformerConfig:
    """The network that a folder, a published name or a config dictionary describes."""
    settings = settings_of(source, part)
    return FAMILIES[settings["model_type"]].config(settings)


def load(
    folder: str | os.PathLike, *, part: str | None = None, dtype: Any = jnp.float32
) -> tuple[TransformerConfig, TransformerParams]:
    """The network of a checkpoint folder, with its weights.

    Heads and poolers are left aside. Weights are read once; the folder is only read.

    Args:
        folder: Holds config.json and model.safetensors, pytorch_model.bin, or shards of either.
        part: "encoder" or "decoder" of a model that has both; its encoder by default.
        dtype: Dtype of the parameters.

    Returns:
        (config, params), as `rank_collapse.apply` takes them.

    Raises:
        FileNotFoundError: A folder or file that does not exist.
        ValueError: A file cut short, a tensor missing or of another shape than the config
            implies, an unknown model type or an unsupported variant.
    """
    settings = settings_of(Path(folder), part)  # never the name of a published model
    family = FAMILIES[settings["model_type"]]
    config = family.config(settings)
    weights = CheckpointWeights(Checkpoint(folder), family.ANCHORS, dtype)
    return config, family.params(weights, settings, config)


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
    family = FAMILIES[settings["model_type"]]
    config = family.config(settings)
    weights = RandomWeights(key, lambda name: family.draw(name, settings), dtype)
    return config, family.params(weights, settings, config)
