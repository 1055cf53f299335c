"""Training networks on token-wise tasks: one seed, or whole ensembles in one call."""

from rank_collapse.training.ensemble import Ensemble, Trained
from rank_collapse.training.model_file import dump_models, load_models
from rank_collapse.training.training import (
    Hyper,
    Model,
    Recipe,
    TrainState,
    forward,
    init_model,
    init_state,
    train_epoch,
    train_step,
)

__all__ = [
    "Ensemble",
    "Hyper",
    "Model",
    "Recipe",
    "TrainState",
    "Trained",
    "dump_models",
    "forward",
    "init_model",
    "init_state",
    "load_models",
    "train_epoch",
    "train_step",
]
