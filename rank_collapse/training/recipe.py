"""The definition of a training run: a static `Recipe`, and a `Hyper` with floats to sweep."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np

from rank_collapse import checks, struct
from rank_collapse.annotations import Number, Tree
from rank_collapse.network.config import TransformerConfig, check_config
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.training.tasks.examples import LOSSES

Loss = Literal["cross_entropy", "squared_error"]
Schedule = Literal["constant", "milestones", "linear", "inverse_sqrt"]
Optimizer = Literal["adam", "radam"]
SCHEDULES, OPTIMIZERS = get_args(Schedule), get_args(Optimizer)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The static part of a training run, which is compiled in.

    Attributes:
        config: The network, with an embedding; or an `EncoderDecoderConfig`, whose decoder is
            trained by teacher forcing.
        num_outputs: Classes, or width of the targets; of an encoder-decoder the vocabulary.
        batch_size, num_epochs: Examples per step, passes over the data.
        loss: A name of `tasks.examples.LOSSES`.
        shuffle: Whether each epoch draws a new order; if not, batches are as the data lie.
        schedule: "constant"; "milestones": learning rate · decay^(milestones passed), by epoch;
            "linear": to 0 at the last step; "inverse_sqrt": √(warmup / step) after the warm-up
            (Vaswani et al. 2017, section 5.3). All begin with the warm-up of `Hyper`.
        milestones, decay: Steps at which the rate falls, and the factor by which it falls.
        clip_norm: Largest global norm of a gradient; None for any.
        output_dropout: Dropout of the network's output too, before the classifier.
        unroll: Layers computed per step of the loop over the depth: more take longer to compile
            and save the memory traffic of the loop's buffers. In place of `config.unroll`, which
            the evaluation keeps. Does not change results.
        optimizer: "adam" (Kingma and Ba 2015) or "radam" (Liu et al. 2020: no adaptive step until
            the variance of its scale is tractable).
        b1, b2, eps: Parameters of the optimizer: decay of the two moments, and the number that is
            added to the root.
        start: (the network's drawn parameters, `Hyper.start`) → the parameters at which training
            starts; None for the drawn ones.
    """

    config: TransformerConfig | EncoderDecoderConfig
    num_outputs: int
    batch_size: int
    num_epochs: int
    loss: Loss = "cross_entropy"
    shuffle: bool = False
    schedule: Schedule = "constant"
    milestones: tuple[int, ...] = (15, 30, 40, 50, 60)
    decay: float = 0.91
    clip_norm: float | None = None
    output_dropout: bool = False
    unroll: int = 6
    optimizer: Optimizer = "adam"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    start: Callable[[TransformerParams, Tree], TransformerParams] | None = None

    def __post_init__(self):
        struct.check_static_fields(self, num_outputs=1, batch_size=1, unroll=1, num_epochs=0)
        checks.check_numbers("[0, 1)", b1=self.b1, b2=self.b2)
        norm = math.inf if self.clip_norm is None else self.clip_norm
        checks.check_numbers("(0, inf]", eps=self.eps, clip_norm=norm, decay=self.decay)
        checks.check_choices(self, loss=tuple(LOSSES), schedule=SCHEDULES, optimizer=OPTIMIZERS)
        is_pair = isinstance(self.config, EncoderDecoderConfig)
        if not is_pair:
            check_config(self.config)
        name, network = ("encoder", self.config.encoder) if is_pair else ("config", self.config)
        outputs = self.config.decoder.embedding.vocab_size if is_pair else self.num_outputs
        faults = {
            f"milestones={self.milestones!r} is not a tuple of epochs": (
                not isinstance(self.milestones, tuple)
                or not all(isinstance(epoch, int) for epoch in self.milestones)
            ),
            f"start={self.start!r} is not a function": (
                self.start is not None and not callable(self.start)
            ),
            f"{name}.embedding=None: a trained network needs an embedding": (
                network.embedding is None
            ),
            f"num_outputs={self.num_outputs} is not the decoder's vocab_size={outputs}": (
                self.num_outputs != outputs
            ),
            "output_dropout=True does not apply to an encoder-decoder": (
                is_pair and self.output_dropout
            ),
        }
        for message, is_fault in faults.items():
            checks.refuse_if(is_fault, message)


class Hyper(struct.Struct):
    """The values that may differ between the runs of an ensemble, all traced scalars.

    Attributes:
        learning_rate: The largest learning rate, which the schedule of the recipe multiplies.
        weight_decay: Factor of the weights that are added to the gradient (L2, as in Adam with
            decay).
        dropout: Rate of dropout. None compiles no dropout at all, which is a tenth faster than a
            rate of 0.
        output_dropout: Multiplies the rate of dropout on the output, if the recipe has it.
        init_scale: Multiplies the initial weights of the layers.
        warmup: Number of steps over which the learning rate rises linearly; 0 for none.
        label_smoothing: ε: labels are (1 − ε) onehot + ε / c.
        network: Floats of the configuration by name ("skip_gain", "init_gain", "temperature", ...),
            which replace those of the recipe's network; None for none. For an encoder-decoder it
            has a dictionary for each half: {"encoder": {"skip_gain": ...}, "decoder": {...}}.
        start: Argument of `Recipe.start`.
    """

    learning_rate: Number = 1e-3
    weight_decay: Number = 0.0
    dropout: Number | None = 0.1
    output_dropout: Number = 1.0
    init_scale: Number = 1.0
    warmup: Number = 0.0
    label_smoothing: Number = 0.0
    network: Mapping[str, Tree] | None = None
    start: Tree = None


def run_config(
    recipe: Recipe, hyper: Hyper, **fields: Tree
) -> TransformerConfig | EncoderDecoderConfig:
    """Returns the recipe's network with the floats of one run.

    Args:
        recipe, hyper: Recipe and traced values of the run.
        **fields: Replaced too, in both halves of an encoder-decoder alike.
    """
    config, floats = recipe.config, hyper.network or {}
    if not isinstance(config, EncoderDecoderConfig):
        return config.replace(**floats, **fields)
    halves = {"encoder": config.encoder, "decoder": config.decoder}
    half_floats = {
        half: network.replace(**floats.get(half, {}), **fields) for half, network in halves.items()
    }
    return config.replace(**half_floats)


# Where the numbers of `Hyper` lie; None, text and NaN are none.
INTERVALS = {
    "learning_rate": "[-inf, inf]",
    "weight_decay": "[-inf, inf]",
    "init_scale": "[-inf, inf]",
    "warmup": "[0, inf]",
    "dropout": "[0, 1)",
    "output_dropout": "[0, inf]",
    "label_smoothing": "[0, 1)",
}


def check_hyper(hyper: Hyper, recipe: Recipe) -> None:
    """Check floats, or arrays of them, of a training run; traced ones are not checked.

    Args:
        hyper: Values of the run.
        recipe: The recipe, whose loss decides whether labels can be smoothed.

    Raises:
        ValueError: A value outside of its range, or of the wrong type.
    """
    kind, network = type(hyper).__name__, getattr(hyper, "network", None)
    checks.refuse(
        (not isinstance(hyper, Hyper), f"hyper is a {kind}, not a Hyper"),
        (
            not isinstance(network or {}, Mapping),
            f"network={network!r:.80} is not a mapping of names",
        ),
    )
    numbers = hyper.replace(dropout=0.0) if hyper.dropout is None else hyper
    for name, interval in INTERVALS.items():
        checks.check_numbers(interval, arrays=True, **{name: getattr(numbers, name)})
    product = {"dropout * output_dropout": numbers.dropout * numbers.output_dropout}
    checks.check_numbers("[0, 1)", arrays=True, **product)
    checks.refuse_if(
        recipe.loss != "cross_entropy" and np.any(hyper.label_smoothing),
        f"label_smoothing={hyper.label_smoothing} smooths classes, but loss={recipe.loss!r} has "
        "none",
    )
