"""The definition of a training run: a static `Recipe`, and a `Hyper` with floats to sweep."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from rank_collapse import struct
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.encoder_decoder import EncoderDecoderConfig
from rank_collapse.training.tasks.examples import LOSSES

Loss = Literal["cross_entropy", "squared_error"]
Schedule = Literal["constant", "milestones", "linear", "inverse_sqrt"]
Optimizer = Literal["adam", "radam"]
SCHEDULES, OPTIMIZERS = get_args(Schedule), get_args(Optimizer)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The static part of a training run, which is compiled in.

    Attributes:
        config: The network, with an embedding; or an `EncoderDecoderConfig`, whose decoder is then
            trained to continue targets that are forced on it.
        num_outputs: Classes, or width of the targets; of an encoder-decoder the vocabulary.
        batch_size, num_epochs: Examples per step, passes over the data.
        loss: A name of `tasks.examples.LOSSES`.
        shuffle: Whether each epoch draws a new order; if not, batches are as the data lie.
        schedule: "constant"; "milestones": learning rate · decay^(milestones passed), by epoch;
            "linear": to 0 at the last step; "inverse_sqrt": √(warmup / step) after the warm-up
            (Vaswani et al. 2017, section 5.3). All begin with the warm-up of `Hyper`.
        milestones, decay: Of the milestones.
        clip_norm: Largest global norm of a gradient; None for any.
        output_dropout: Dropout of the network's output too, before the classifier.
        unroll: Layers computed per step of the loop over the depth: more take longer to compile
            and save the memory traffic of the loop's buffers. In place of `config.unroll`, which
            the evaluation keeps. Does not change results.
        optimizer: "adam" (Kingma and Ba 2015) or "radam" (Liu et al. 2020: no adaptive step until
            the variance of its scale is tractable).
        b1, b2, eps: Of the optimizer: decay of the two moments, and what is added to the root.
        start: (the network's parameters as drawn, `Hyper.start`) → as training starts from them;
            None for as they are drawn.
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
    start: Callable[[Any, Any], Any] | None = None

    def __post_init__(self):
        struct.check_integers(self, num_outputs=1, batch_size=1, unroll=1, num_epochs=0)
        struct.check_choices(self, loss=tuple(LOSSES), schedule=SCHEDULES, optimizer=OPTIMIZERS)
        is_pair = isinstance(self.config, EncoderDecoderConfig)
        name, network = ("encoder", self.config.encoder) if is_pair else ("config", self.config)
        outputs = self.config.decoder.embedding.vocab_size if is_pair else self.num_outputs
        faults = {
            f"b1={self.b1} is not in [0, 1)": not 0 <= self.b1 < 1,
            f"b2={self.b2} is not in [0, 1)": not 0 <= self.b2 < 1,
            f"eps={self.eps} is not positive": not self.eps > 0,
            f"clip_norm={self.clip_norm} is not positive": (
                self.clip_norm is not None and not self.clip_norm > 0
            ),
            f"{name}.embedding=None: a trained network needs an embedding": (
                network.embedding is None
            ),
            f"num_outputs={self.num_outputs} is not the decoder's vocab_size={outputs}": (
                self.num_outputs != outputs
            ),
            "output_dropout=True: an encoder-decoder has none": is_pair and self.output_dropout,
        }
        for message, is_fault in faults.items():
            struct.refuse_if(is_fault, message)


class Hyper(struct.Struct):
    """The values that may differ between the runs of an ensemble, all traced scalars.

    `weight_decay` is added to the gradient (L2, as in Adam with decay), `init_scale` multiplies
    the initial weights of the layers. The learning rate rises linearly over the first `warmup`
    steps (0: at once); `label_smoothing` ε trains on labels (1 − ε) onehot + ε / c. `network` holds
    floats of the configuration by name ("skip_gain", "init_gain", "temperature", ...), each as it
    may stand there, in place of the recipe's; None for none. Of an encoder-decoder, those of each
    half: {"encoder": {"skip_gain": ...}, "decoder": {...}}. `start` is given to `Recipe.start`.
    A `dropout` of None is compiled as none at all, a tenth faster than a rate of 0. On the output,
    where the recipe has dropout there, its rate is multiplied by `output_dropout`.
    """

    learning_rate: Any = 1e-3
    weight_decay: Any = 0.0
    dropout: Any = 0.1
    output_dropout: Any = 1.0
    init_scale: Any = 1.0
    warmup: Any = 0.0
    label_smoothing: Any = 0.0
    network: Any = None
    start: Any = None


def run_config(
    recipe: Recipe, hyper: Hyper, **fields: Any
) -> TransformerConfig | EncoderDecoderConfig:
    """Returns the recipe's network with the floats of one run.

    Args:
        recipe, hyper: Of the run.
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


def check_hyper(hyper: Hyper, recipe: Recipe) -> None:
    """Raises an error for invalid floats or arrays of them; traced ones are not checked."""
    if fault := find_fault(hyper, recipe):
        raise ValueError(fault)


def find_fault(hyper: Hyper, recipe: Recipe) -> str:
    """Returns what is wrong with the floats of a run, or arrays of them; "" for nothing."""
    if not isinstance(hyper, Hyper):
        return f"hyper is a {type(hyper).__name__}, not a Hyper"
    warmup, smoothing = np.asarray(hyper.warmup), np.asarray(hyper.label_smoothing)
    rate = np.asarray(0.0 if hyper.dropout is None else hyper.dropout)
    output_rate = rate * np.asarray(hyper.output_dropout)
    no_classes = f"smooths classes, and loss={recipe.loss!r} has none"
    checks = (
        ("dropout", rate, (rate >= 0) & (rate < 1), "is not in [0, 1)"),
        (
            "dropout * output_dropout",
            output_rate,
            (output_rate >= 0) & (output_rate < 1),
            "is not in [0, 1)",
        ),
        ("warmup", warmup, warmup >= 0, "is not 0 or a number of steps"),
        ("label_smoothing", smoothing, (smoothing >= 0) & (smoothing < 1), "is not in [0, 1)"),
        (
            "label_smoothing",
            smoothing,
            (smoothing == 0) | (recipe.loss == "cross_entropy"),
            no_classes,
        ),
    )
    for name, values, is_valid, fault in checks:
        if not np.all(is_valid):
            return f"{name}={float(values[~is_valid].flat[0])} {fault}"
    return ""
