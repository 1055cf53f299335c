"""Training networks on token-wise tasks: one seed, or whole ensembles in one call."""

from rank_collapse.training.ensemble import Ensemble as Ensemble, Trained as Trained
from rank_collapse.training.model_file import dump_models as dump_models, load_models as load_models
from rank_collapse.training.recipe import (
    check_hyper as check_hyper,
    config_of as config_of,
    fault_of as fault_of,
)
from rank_collapse.training.tasks.examples import Examples as Examples
from rank_collapse.training.training import (
    Hyper as Hyper,
    Model as Model,
    Recipe as Recipe,
    TrainState as TrainState,
    batch_forward as batch_forward,
    forward as forward,
    init_model as init_model,
    init_state as init_state,
    train_epoch as train_epoch,
    train_step as train_step,
)
from rank_collapse.training.watched import layer_scalars as layer_scalars
