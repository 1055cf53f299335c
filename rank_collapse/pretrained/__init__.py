"""Pretrained architectures as configurations of the one network.

`load` reads a checkpoint folder as Hugging Face saves it, or a model in memory; `random_like`
gives the same architecture at its own initialisation. `open_checkpoint` leaves the layers in the
file until `stream` measures them, one by one. A family is a table of entries and names, in
`families`.
"""

from rank_collapse.pretrained.families import FAMILIES
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.gradients import stream_gradients
from rank_collapse.pretrained.loading import (
    config_of,
    load,
    open_checkpoint,
    open_random,
    random_like,
    settings_of,
)
from rank_collapse.pretrained.opened import InMemory, OpenCheckpoint
from rank_collapse.pretrained.patches import image_patches
from rank_collapse.pretrained.published import PUBLISHED, published_curves
from rank_collapse.pretrained.streaming import AblationSpec, Group, State, state_like, stream
from rank_collapse.pretrained.unembedding import Unembedding

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "AblationSpec",
    "Family",
    "Group",
    "InMemory",
    "OpenCheckpoint",
    "State",
    "Unembedding",
    "config_of",
    "image_patches",
    "load",
    "open_checkpoint",
    "open_random",
    "published_curves",
    "random_like",
    "settings_of",
    "state_like",
    "stream",
    "stream_gradients",
]
