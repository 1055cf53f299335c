"""`watch` and `Watch` of PyTorch: which steps are measured, and the row of each."""

import functools
import itertools
import math
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rank_collapse.checks import check_choice, check_whole
from rank_collapse.measures.spikes import TOKEN_KINDS
from rank_collapse.printed import format_count
from rank_collapse.watch.names import PARTS
from rank_collapse.watch.recorder import (
    LeftOut,
    Notes,
    Recorder,
    make_transformers_callback,
)
from rank_collapse.watch.torch_gradients import measure_gradient
from rank_collapse.watch.torch_models import check_model, is_sharded, read_layers
from rank_collapse.watch.torch_passes import Pass
from rank_collapse.watch.torch_steps import REMOVED, OpenWatches, StepTimes

SHARED = "no gradients: the weights are shared with run 1, whose gradients are those of all runs"
NUM_SKIPPED = 100  # steps of other optimizers, after which one that has not stepped is replaced


def watch(
    model: nn.Module,
    every: int = 100,
    log: object = None,
    tokens: str = "read",
    layers: int | str | Sequence[int | str] | Callable[[str, nn.Module], bool] | None = None,
    mask: Callable[[Any, Any], Tensor] | None = None,
) -> "Watch":
    """Measures a model at regular steps of its optimizer, until `close` or the model's end.

    A layer is an attention: any place where weights are multiplied with values. Layers are numbered
    in the order in which they first run. The steps are those of the first optimizer that steps and
    has parameters of the model. If a step has several forward passes (accumulated gradients), the
    first one is measured. A metric that cannot be measured is left out with a reason, in
    `Watch.describe()` and once as a warning. Training stays bit-identical, and an error in a
    measurement or a log never stops it. If there are several processes, the first one writes the
    measurements of its own texts. Measured steps of a compiled model run without compilation
    (`torch.compiler.set_stance`).

    Args:
        model: The model, before or after `torch.compile` and `DistributedDataParallel`.
        every: Steps.
        log: log({name: number}, step=...), such as `trackio.log` or `wandb.log`; a TensorBoard
            writer; the path of a JSON Lines file for this watch alone, in the format of
            `rank_collapse.runs.metrics`, or its folder; None to fill only `Watch.rows`.
        tokens: "read", the input of each layer's attention; "raw", the output of each layer;
            "unit", that output with every token divided by its norm.
        layers: Numbers of layers; or dotted names of modules, so that only attentions inside them
            are numbered; or a function of (name, module of an attention). None for all.
        mask: mask(args, kwargs) of the model's call, which returns Bool [b, n], the tokens that
            exist. None takes a mask among the arguments, or else the keys that attention itself
            excludes.

    Returns:
        The watch: `rows`, `alarms`, `describe()`, `close()`, and the callback `hf()`.

    Raises:
        ValueError: An invalid argument, or a model under tensor parallelism or
            `FullyShardedDataParallel`.
    """
    return Watch(model, every, log, tokens, layers, mask)


class Watch:
    """What measures a model; see `watch`.

    Attributes:
        rows: {"step": .., name: a number, or a list with one number for each layer} of each
            measured step; NaN for a layer that was not measured. Names are those of `rc.monitor`;
            attention to other tokens has the prefix "cross.".
        alarms: The thresholds of `MEASURES` that were crossed, each once.
    """

    def __init__(self, model, every, log, tokens, layers, mask):
        check_model(model)
        check_choice(f"tokens={tokens!r}", tokens, TOKEN_KINDS)
        if mask is not None and not callable(mask):
            raise ValueError(f"mask={mask!r} is not a function of (args, kwargs)")
        self._model = weakref.ref(model)
        self._every = check_whole("every", every, 1)
        self.notes = Notes()
        select, self._numbers = read_layers(model, layers)
        self._recorder = Recorder(log, self.notes)
        self.rows, self.alarms = self._recorder.rows, self._recorder.alarms
        self._begin_pass = functools.partial(Pass, self._model, select, tokens, mask, self.notes)
        self.measured: Pass | None = None  # that of a step which is due
        self._layers: list[tuple[str, int]] = []  # (attention, which run of it) of each layer
        self._step, self._last_step = 0, None
        self._optimizer: Any = lambda: None  # a weak reference to the one that counts
        self._num_skipped, self._has_gradients = 0, False
        self._times = StepTimes()
        self._end = weakref.finalize(model, self.close)  # so it lives as long as the model
        self._end.atexit = False
        OpenWatches.change([self], [])
        self._prepare()

    def close(self) -> None:
        """Ends the watch; warns if the model ran but no optimizer stepped."""
        self._end.detach()
        if self._step == 0 and self.measured and self.measured.runs.attentions:
            self.notes.leave_out(
                None, "rows", "no optimizer of the model stepped: set Watch.step before each step"
            )
        self.measured = None
        OpenWatches.change([], [self])

    @property
    def step(self) -> int:
        """Returns the number of steps of the optimizer so far. Set it if torch does not see
        them."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        """Sets the step; writes the measures of the step before."""
        value = check_whole("step", value, 0)
        if value != self._step:
            if self.measured and self.measured.runs.attentions:
                self._write()
            else:
                self._times.end_step(False)
            self._step = value
        self._prepare()

    def describe(self) -> str:
        """Lists the last measurements of each layer, and the metrics that are left out, with
        reasons."""
        model = self._model()
        row = self.rows[-1] if self.rows else {}
        title = "a model that is gone" if model is None else type(model).__name__
        cost = self._times.describe(self._every)
        every = "every step" if self._every == 1 else f"every {self._every} steps"
        lines = [f"{title}, {every}, {format_count(len(self.rows), 'row')}; cost: {cost}"]
        if not OpenWatches.has_hooks():
            lines.append(f"  no steps: {REMOVED}")
        texts: dict[Any, list[str]] = {}
        for (name, _), text in self.notes.reasons.items():
            if REMOVED in text:
                continue
            texts.setdefault(name, []).append(text)
        layer_names = {name for name, _ in self._layers}
        for name in (name for name in texts if name not in layer_names):
            title = f"{name}: " if name else ""
            lines += [f"  {title}{text}" for text in texts[name]]
        for number, (name, turn) in enumerate(self._layers):
            names = [
                metric
                for metric, column in row.items()
                if isinstance(column, list) and not math.isnan(column[number])
            ]
            title = name + (f", run {turn + 1}" if turn else "")
            reasons = [*texts.get(name, []), *([SHARED] if turn else [])]
            omitted = f" ({'; '.join(reasons)})" if reasons else ""
            lines.append(f"  {number} {title}: {', '.join(names) or 'not measured'}{omitted}")
        return "\n".join(lines)

    __repr__ = describe

    def hf(self) -> Any:
        """Returns a `transformers.TrainerCallback`, which follows the Trainer's steps, logs, and
        closes the watch."""
        return make_transformers_callback(self)

    def _prepare(self):
        """Begins a step that is due, with the modules as they are now."""
        last = self._last_step
        is_due = last is None or self._step // self._every > last // self._every
        if (
            is_due
            and self in OpenWatches.open
            and self._model() is not None
            and self.measured is None
        ):
            self.measured = self._begin_pass()
            OpenWatches.change([], [])

    def before_step(self, optimizer, args, kwargs):
        """Measures the gradients before the step, because some optimizers change them; not if a
        closure computes them.

        Args:
            optimizer, args, kwargs: Optimizer, args and kwargs of the call of its `step`.
        """
        is_closure = any(map(callable, (*args[1:], *kwargs.values())))
        is_scaled = getattr(optimizer, "grad_scale", None) is not None
        is_pending = self.measured and self.measured.runs.attentions
        if is_pending and not is_closure and not is_scaled and self._is_counted(optimizer):
            self._measure_gradients()

    def after_step(self, optimizer, args, kwargs):
        """Writes the row of a step, and counts it.

        Args:
            optimizer, args, kwargs: Optimizer, args and kwargs of the call of its `step`.
        """
        if not self._is_counted(optimizer):
            return
        if self.measured is None:
            self._times.end_step(False)
        self._write()
        callers = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        if any(name.endswith("_dynamo/eval_frame.py") for name in itertools.islice(callers, 20)):
            self.notes.leave_out(
                None, "steps", "optimizer.step is compiled: set Watch.step before each"
            )
        self._step += 1
        self._prepare()

    def _is_counted(self, optimizer):
        """Returns whether an optimizer is the one whose steps are counted.

        This is the first optimizer with a parameter of the model, or another one if the first has
        not stepped for long.

        Args:
            optimizer: Optimizer that steps.
        """
        if self._optimizer() is None or self._num_skipped > NUM_SKIPPED:
            parameters = {id(p) for p in self._model().parameters()}
            stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
            if not parameters.isdisjoint(stepped):
                self._optimizer = weakref.ref(optimizer)
        is_counted = self._optimizer() is optimizer
        self._num_skipped = 0 if is_counted else self._num_skipped + 1
        return is_counted

    def _measure_gradients(self):
        """Measures the gradients of each run, before or after the optimizer's step."""
        if self._has_gradients:
            return
        if is_sharded(self._model()):
            self.notes.leave_out(None, "gradients", "under FSDP2 each process has parts of them")
            self._has_gradients = True
            return
        for run in self.measured.runs.attentions:
            for part in PARTS if run.shares else ():
                shares = [share for product in run.shares for share in product[part]]
                norm = self.notes.attempt(run.name, f"{part} gradient", measure_gradient, shares)
                if norm is not None:
                    run.scalars[f"{part}_gradient"] = norm
        self._has_gradients = True

    def _write(self):
        """Writes the row of the step, if it is due and something was measured."""
        if self.measured is not None:
            self._last_step = self._step
            self.notes.attempt(None, "layers", self._add_row, self._step)
            self.measured, self._has_gradients = None, False
            self._times.end_step(True)
            OpenWatches.change([], [])

    def _add_row(self, step):
        """Collects the scalars of a step, and records them.

        Args:
            step: Number of the step of the row.

        Raises:
            LeftOut: No layer was measured, for an unknown reason.
        """
        self._measure_gradients()
        scalars = self._collect(self.measured.runs.attentions)
        columns = dict(scalars)
        if self.measured.loss is not None:
            columns["loss"] = {-1: self.measured.loss}
        if columns:
            # All scalars go to the host in one transfer, {(name, layer): tensor}.
            tensors = {(name, i): a for name, column in columns.items() for i, a in column.items()}
            numbers = torch.stack([a.float().to("cpu") for a in tensors.values()]).tolist()
            row: dict[str, dict[int, float]] = {name: {} for name in columns}
            for (name, layer), number in zip(tensors, numbers, strict=True):
                row[name][layer] = number
            has_ranks = distributed.is_available() and distributed.is_initialized()
            is_writing = not has_ranks or distributed.get_rank() == 0  # of several processes
            self._recorder.add(step, row, len(self._layers), is_writing)
        if not scalars and not self.notes.reasons.keys() - {(None, "layers")}:
            raise LeftOut(self.measured.reason)

    def _collect(self, runs):
        """Computes {name: {number of a layer: scalar}}.

        Args:
            runs: Runs of the step.
        """
        scalars: dict[str, dict[int, Any]] = {}
        crossings: dict[int, str] = {}  # the cross-attention of each layer
        for run in runs:
            layer = _find_layer(run, runs)
            if layer not in self._layers:
                self._layers.append(layer)
            number = self._layers.index(layer)
            if self._numbers and number not in self._numbers:
                continue
            if run.is_cross and crossings.setdefault(number, run.name) != run.name:
                reason = f"its layer has another one: {crossings[number]} is measured"
                self.notes.leave_out(run.name, "cross-attention", reason)
                continue
            if run.products:
                run.scalars |= self.notes.attempt(run.name, "weights", _combine_products, run) or {}
            for name, scalar in run.scalars.items():
                column = f"cross.{name}" if run.is_cross else name
                scalars.setdefault(column, {})[number] = scalar
        for number in self._numbers if self._layers else ():
            subject, count = f"layer {number}", len(self._layers)
            if number < count:
                self.notes.reasons.pop((None, subject), None)
            else:
                where = "layer 0 alone" if count == 1 else f"layers 0 to {count - 1}"
                self.notes.leave_out(None, subject, f"attention ran in {where}")
        return scalars


def _find_layer(run, runs):
    """Finds (name, turn) of a run's layer; attention to other tokens takes them from its block.

    Args:
        run: The run.
        runs: All runs of the step.
    """
    if run.is_cross:
        for frame in reversed(run.frames[1:]):
            layers = [r for r in runs if not r.is_cross and frame in r.frames]
            if layers:
                run = layers[0] if len(layers) == 1 else run
                break
    return run.name, run.turn


def _combine_products(run):
    """Computes {name: mean over heads, and the least and the largest} of the products of a run."""
    frames = [frame for frame, _ in run.products]
    if len(set(frames)) < len(frames):
        raise LeftOut(f"{len(frames)} products of queries and keys in one run of it")
    scalars = {}
    for name in dict.fromkeys(name for _, product in run.products for name in product):
        heads = [product[name].reshape(-1) for _, product in run.products if name in product]
        scalars[name] = torch.cat(heads).mean()
        if name == "attention_entropy":
            scalars[f"{name}_least"] = torch.cat(heads).min()
            scalars[f"{name}_largest"] = torch.cat(heads).max()
    return scalars
