"""Pretrained architectures as configurations of the one network.

`load` reads a checkpoint folder as Hugging Face saves it, or a model in memory; `random_like`
gives the same architecture at its own initialisation. One file per family maps its names and
shapes; `families` is the table of them.
"""

from rank_collapse.pretrained.families import (
    FAMILIES,
    config_of,
    load,
    random_like,
    settings_of,
)
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.published import PUBLISHED, published_curves

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "Family",
    "config_of",
    "load",
    "published_curves",
    "random_like",
    "settings_of",
]
