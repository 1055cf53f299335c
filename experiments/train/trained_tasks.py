"""Tasks that networks are trained on: recipe, data, metrics, and what the metrics of a seed are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from experiments.lab import JsonObject, Options
from experiments.train import arguments
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig, EncoderDecoderParams
from rank_collapse.training import Hyper, Recipe
from rank_collapse.training.models import Model
from rank_collapse.training.recipe import check_hyper
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.tasks.sequences import SequencePairs
from rank_collapse.training.training import batch_forward

ALONE = "results"  # the part of the arrays of a run that trains one network
TrainedModel = Model | EncoderDecoderParams
Data = dict[str, Examples | SequencePairs]  # of one seed: "train", "eval", and others
Metrics = Mapping[
    str, Callable[[Float[Array, "b n c"], Examples | SequencePairs], Float[Array, ""]]
]


@dataclass(frozen=True)
class TrainedTask:
    """One trained experiment.

    Attributes:
        options: The flags it is of.
        name: Name of the folder under results/.
        title: Title of the figure.
        recipe: The training recipe.
        make_data: key → {"train", "eval"} Examples of one seed; also "texts", the training data for
            the evaluation, if "train" is packed.
        metrics: Functions of (logits, examples) by name, "accuracy" among them.
        published: {"whole": accuracy, "baseline": accuracy} as the published code plots them.
        batch_size: Examples evaluated at a time; None for all.
        extra: Further settings that determine the results, for config.json.
        curves: Whether the metrics are measured on the evaluation data after each epoch.
        floats: Fields of `Hyper` that are not taken from the flags.
        program: Name of the compiled program: setups with the same name differ in their floats
            alone; "" for a separate program.
    """

    options: Options
    name: str
    title: str
    recipe: Recipe
    make_data: Callable[[jax.Array], Data]
    metrics: Metrics = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    extra: JsonObject | None = None
    curves: bool = False
    floats: Mapping[str, PyTree[ArrayLike]] = field(default_factory=dict)
    program: str = ""

    def make_hyper(self, point: Options) -> Hyper:
        """Makes the traced values of a point of the flags, float32.

        Raises:
            ValueError: Values that are invalid for the recipe.
        """
        hyper = arguments.make_hyper(point, self.floats)
        check_hyper(hyper, self.recipe)
        return jax.tree.map(np.float32, hyper)


def whole_metrics(
    model: TrainedModel,
    examples: Examples | SequencePairs,
    config: TransformerConfig | EncoderDecoderConfig,
    metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, Float[Array, ""]]:
    """Computes the metrics of a whole model, without dropout.

    Args:
        model: Network and classifier, or an encoder-decoder.
        examples: Examples to evaluate, [b, n].
        config: Configuration of the network.
        metrics: Functions of (logits, examples) by name.
        batch_size: Examples at a time; None for all.
    """
    logits = batch_forward(model, examples, config, batch_size=batch_size)
    return compute_metrics(metrics, examples, logits)


def compute_metrics(
    metrics: Metrics, examples: Examples | SequencePairs, logits: Float[Array, "b n c"]
) -> dict[str, Float[Array, ""]]:
    """Computes all metrics of logits [b, n, c]."""
    return {name: fn(logits, examples) for name, fn in metrics.items()}


def measure_whole(
    task: TrainedTask, model: TrainedModel, data: Data, key: jax.Array
) -> dict[str, dict[str, Float[Array, ""]]]:
    """Measures one seed's metrics alone, for `train_networks`: {"whole": {metric: []}}."""
    return {"whole": whole_metrics(model, data["eval"], task.recipe.config, task.metrics)}


def train_and_eval(
    make: Callable[[jax.Array, int], Examples], num_train: int, num_eval: int, key: jax.Array
) -> dict[str, Examples]:
    """Makes training and evaluation data of one seed.

    Args:
        make: (key, number) → examples.
        num_train, num_eval: Examples of each.
        key: Random key of the seed.
    """
    key_train, key_eval = jax.random.split(key)
    return {"train": make(key_train, num_train), "eval": make(key_eval, num_eval)}


def fine_seeds(results: Mapping[str, PyTree[np.ndarray]]) -> np.ndarray:
    """Lists the positions of the seeds that did not diverge."""
    return np.flatnonzero(results["diverged_at"] < 0)


def diverged_seeds(results: Mapping[str, PyTree[np.ndarray]]) -> np.ndarray:
    """Flags the seeds that diverged [s], 0 or 1."""
    return (results["diverged_at"] >= 0).astype(int)
