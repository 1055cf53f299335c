"""The three models whose residual curves were published (Dong et al. 2021): sizes and curves.

A name such as "random:bert-base-cased" means that architecture with random weights; a plain name
always means a folder.
"""

import json
import os
from collections.abc import Mapping
from importlib import resources

_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
PUBLISHED = {
    "bert-base-cased": {"model_type": "bert", "vocab_size": 28996} | _BASE,
    "albert-base-v2": {"model_type": "albert", "vocab_size": 30000, "embedding_size": 128} | _BASE,
    "xlnet-base-cased": {
        "model_type": "xlnet",
        "vocab_size": 32000,
        "d_model": 768,
        "n_layer": 12,
        "n_head": 12,
        "d_inner": 3072,
    },
}
RANDOM = "random:"
RANDOM_WEIGHTS = "random weights"  # what is written wherever numbers of these are
_COMPARED = ("model_type", "hidden_size", "d_model")  # entries that a model of this size shares


def is_random_name(source: object) -> bool:
    """Check whether a source is "random:" and a name or a folder: its architecture, random weights.

    Args:
        source: See `pretrained.settings_of`.
    """
    return isinstance(source, str) and source.startswith(RANDOM)


def suggest_names(folder: str | os.PathLike) -> str:
    """Suggest names for a name that is not a folder.

    Args:
        folder: Path that does not exist; a path of several folders gets no suggestion.
    """
    name = str(folder)
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return ""
    architecture = name if name in PUBLISHED else "NAME"
    names = "" if name in PUBLISHED else f" (NAME: {', '.join(PUBLISHED)})"
    return (
        f"; hf:{name} is the model of that name on the Hugging Face hub, {RANDOM}{architecture} "
        f"random weights of an architecture{names}"
    )


def published_curves(
    settings: Mapping[str, object], depth: int
) -> dict[str, dict[str, list[float]]]:
    """Return {"init" or "pretrained": {variant: residual ratio by layer}} of a model of this size.

    Args:
        settings: Settings from `rank_collapse.pretrained.settings_of`.
        depth: Number of layers.

    Returns:
        Empty where nothing was published for this family and size.
    """
    text = resources.files("rank_collapse").joinpath("data/published_residual_curves.json")
    for name, curves in json.loads(text.read_text("utf-8"))["curves"].items():
        published = PUBLISHED[name]
        is_same_model = all(settings.get(k) == published[k] for k in _COMPARED if k in published)
        if is_same_model and len(curves["init"]["SAN"]) - 1 == depth:
            return curves
    return {}
