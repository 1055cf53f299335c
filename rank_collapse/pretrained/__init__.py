"""Reads checkpoints of BERT, GPT-2, Llama and others as networks of this library.

`load` reads a checkpoint folder in the format of Hugging Face, or a model in memory; `random_like`
gives the same architecture at its own initialisation. `open_checkpoint` leaves the layers in the
file until `stream` measures them, one by one. A family is a table of entries and names, in
`families`.
"""

from rank_collapse.pretrained.families import FAMILIES as FAMILIES
from rank_collapse.pretrained.families.vit import image_patches as image_patches
from rank_collapse.pretrained.family import Family as Family
from rank_collapse.pretrained.loading import (
    config_of as config_of,
    load as load,
    open_checkpoint as open_checkpoint,
    open_random as open_random,
    random_like as random_like,
    settings_of as settings_of,
)
from rank_collapse.pretrained.opened import (
    InMemory as InMemory,
    MaskedHead as MaskedHead,
    OpenCheckpoint as OpenCheckpoint,
)
from rank_collapse.pretrained.predictions import (
    targets_of as targets_of,
    token_losses as token_losses,
)
from rank_collapse.pretrained.published import (
    PUBLISHED as PUBLISHED,
    published_curves as published_curves,
)
from rank_collapse.pretrained.report import (
    CheckpointReport as CheckpointReport,
    checkpoint_report as checkpoint_report,
)
from rank_collapse.pretrained.streaming import (
    AblationSpec as AblationSpec,
    Group as Group,
    State as State,
    stream as stream,
)
from rank_collapse.pretrained.weights import Unembedding as Unembedding
