"""The table of families, by the `model_type` of their config.json. A new family is a `Family`."""

from typing import Any

from rank_collapse.pretrained.families import (
    bert,
    decoders,
    experts,
    gemma,
    gpt,
    modernbert,
    t5,
    vit,
    whisper,
    xlnet,
)
from rank_collapse.pretrained.family import Family
from rank_collapse.printed import quote_value

_MODULES = (bert, modernbert, xlnet, t5, gpt, decoders, gemma, experts, vit, whisper)
FAMILIES: dict[str, Family] = {
    found.model_type: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, Family) and found.model_type
}


def family_of(model_type: Any) -> Family:
    """The family of a `model_type`."""
    if model_type is None:
        raise ValueError('config.json has no model_type: add one, such as "model_type": "bert"')
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={quote_value(model_type)} is not one of {tuple(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
