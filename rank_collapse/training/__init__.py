"""Trains networks on tasks with a label for each token: one seed, or many seeds in one call."""

from rank_collapse.training.ensemble import Ensemble as Ensemble, Trained as Trained
from rank_collapse.training.model_file import dump_models as dump_models, load_models as load_models
from rank_collapse.training.sweep import Swept as Swept, sweep as sweep
from rank_collapse.training.training import (
    Hyper as Hyper,
    Model as Model,
    Recipe as Recipe,
    TrainState as TrainState,
    forward as forward,
    init_model as init_model,
    init_state as init_state,
    train_epoch as train_epoch,
    train_step as train_step,
)
