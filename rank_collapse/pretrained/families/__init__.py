"""Lists the supported checkpoint families, one `Family` for each `model_type` of config.json."""

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
    family.model_type: family
    for module in _MODULES
    for family in vars(module).values()
    if isinstance(family, Family) and family.model_type
}


def find_family(model_type: Any) -> Family:
    """Return the family of a `model_type`."""
    if model_type is None:
        raise ValueError('config.json has no model_type: add an entry such as "model_type": "bert"')
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type={quote_value(model_type)} is not one of {tuple(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
