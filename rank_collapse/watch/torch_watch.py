"""`watch` and `Watch` of PyTorch: which steps are measured, and the row of each."""

import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rank_collapse import struct
from rank_collapse.measures.spikes import TOKENS
from rank_collapse.watch import torch_trainers
from rank_collapse.watch.recorder import LeftOut, Log, Notes, Recorder
from rank_collapse.watch.torch_gradients import norms, parameters_of
from rank_collapse.watch.torch_passes import Passes, plain_name

Layers = int | str | Sequence[int | str] | Callable[[str, nn.Module], bool] | None
_OF_MODELS: Any = weakref.WeakKeyDictionary()  # {model: its watches}: they live as long as it does


def watch(
    model: nn.Module,
    every: int = 100,
    log: Log = None,
    tokens: str = "read",
    layers: Layers = None,
    mask: Callable[[Any, Any], Tensor] | None = None,
) -> "Watch":
    """Measures a model at every so many steps of its optimizer, until `close` or the model's end.

    A layer is an attention, wherever weights are multiplied with values. Layers are numbered in the
    order in which they first run. A step is one of the optimizer that has parameters of the model,
    of several the first that steps. Of the forward passes of a step (accumulated gradients) the
    first is measured. What cannot be measured is left out with a reason, in `Watch.describe()` and
    once as a warning. Training is the same to the bit, and no error of measuring or writing reaches
    it. Of several processes the first writes what it measures of its own texts. Measured steps of a
    compiled model run without compilation (`torch.compiler.set_stance`).

    Args:
        model: Before or after `torch.compile` and `DistributedDataParallel`.
        every: Steps.
        log: log({name: number}, step=...), such as `trackio.log`, or `wandb.log`; a writer of
            TensorBoard; a path of JSON lines, as `rank_collapse.runs.metrics` has them, or its
            folder; None for `Watch.rows` alone.
        tokens: "read", what each layer's attention reads; "raw", the output of each layer; "unit",
            that with every token divided by its norm.
        layers: Numbers of layers; or dotted names of modules, whose attentions alone are numbered;
            or a function of (name, module of an attention). None for all.
        mask: mask(args, kwargs) of the model's call, Bool [b, n], which tokens exist. None for a
            mask among the arguments, else what attention itself leaves out.

    Returns:
        What watches: `rows`, `alarms`, `describe()`, `close()`, and callbacks `hf()` and
        `lightning()`.

    Raises:
        ValueError: An argument that is not as above, or a model under FSDP or tensor parallelism.
    """
    return Watch(model, every, log, tokens, layers, mask)


class Watch:
    """What measures a model; see `watch`.

    Attributes:
        rows: {"step": .., name: a number, or a list with one for each layer} of each measured step;
            NaN of a layer that was not measured. Names are those of `rc.monitor`; attention to
            other tokens is "cross.name".
        alarms: The thresholds of `MEASURES` that were passed, each once.
    """

    def __init__(self, model, every, log, tokens, layers, mask):
        _check(model, every, tokens, layers, mask)
        self._model, self._layers = weakref.ref(model), layers
        self._every, self._tokens = every, tokens
        self.notes = Notes()
        self._recorder = Recorder(log, self.notes)
        self.rows, self.alarms = self._recorder.rows, self._recorder.alarms
        self._passes = Passes(model, self._selects, tokens, mask, self.notes)
        self._names: list[tuple[str, int]] = []  # of each layer: its attention, and which run of it
        self._step, self._first, self._last, self._missed = 0, 0, None, 0
        self._optimizer: Any = lambda: None  # a weak reference to the one that counts
        self._skipped, self._norms = 0, None
        self.is_open = True
        weakref.finalize(model, self._passes.detach)
        _OF_MODELS.setdefault(model, []).append(self)
        _Watches.add(self)
        self._prepare()

    def close(self) -> None:
        """Ends it."""
        self.is_open = False
        self._passes.detach()
        model = self._model()
        if model is not None and self in _OF_MODELS.get(model, []):
            _OF_MODELS[model].remove(self)

    @property
    def step(self) -> int:
        """Steps of the optimizer so far. Where torch sees none, as of a compiled step, set it."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        if value != self._step:
            if self._passes.runs:
                self._write()
            self._step = int(value)
        self._prepare()

    def follow(self, step: int, first: int) -> None:
        """Takes a trainer's step, in whose count the first is 0 or 1."""
        self._first, self.step = first, step

    def describe(self) -> str:
        """What was last measured in each layer, and what is left out and why."""
        model, reasons = self._model(), self.notes.reasons
        last = self.rows[-1] if self.rows else {}
        title = "a model that is gone" if model is None else type(model).__name__
        lines = [f"{title}, every {self._every} steps, {len(self.rows)} rows"]
        names = [name for name, _ in self._names]
        lines += [
            f"  {f'{name}: ' if name else ''}no {subject}: {why}"
            for (name, subject), why in reasons.items()
            if name not in names
        ]
        for number, (name, turn) in enumerate(self._names):
            measured = [
                n for n, v in last.items() if isinstance(v, list) and v[number] == v[number]
            ]
            text = ", ".join(measured) or "not measured"
            out = "; ".join(f"no {s}: {why}" for (n, s), why in reasons.items() if n == name)
            again = f", run {turn + 1}" if turn else ""
            lines.append(f"  {number} {name}{again}: {text}" + (f" ({out})" if out else ""))
        return "\n".join(lines)

    __repr__ = describe

    def hf(self) -> Any:
        """A `transformers.TrainerCallback`: the Trainer's steps and log; it closes."""
        return torch_trainers.callback_of_transformers(self)

    def lightning(self) -> Any:
        """A `lightning.pytorch.Callback` that takes the trainer's steps, and closes."""
        return torch_trainers.callback_of_lightning(self)

    def _selects(self, name, module):
        """Whether an attention is numbered."""
        layers = self._layers
        if callable(layers):
            return bool(layers(name, module))
        names = [layers] if isinstance(layers, str) else layers if _is_list(layers) else []
        names = [own for own in names if isinstance(own, str)]
        return not names or any(name == own or name.startswith(f"{own}.") for own in names)

    def _is_chosen(self, number):
        layers = [self._layers] if type(self._layers) is int else self._layers
        numbers = [own for own in layers if type(own) is int] if _is_list(layers) else []
        return not numbers or number in numbers

    def _is_due(self):
        step = self._step + self._first
        return self._last is None or step // self._every > self._last // self._every

    def _prepare(self):
        """Begins to see the modules of a step that is due, as they are now."""
        if (
            self._passes.is_attached
            or self._model() is None
            or not self.is_open
            or not self._is_due()
        ):
            return
        self._passes.restart()
        self._passes.attach()

    def before_step(self, optimizer, args, kwargs):
        """Takes the gradients, which some optimizers change; not where a closure makes them."""
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        scaled = getattr(optimizer, "grad_scale", None) is not None
        pending = self._passes.is_attached and self._passes.runs and not closure and not scaled
        if pending and self._counts(optimizer):
            self._norms = self._gradients()

    def after_step(self, optimizer, args, kwargs):
        if not self._counts(optimizer):
            return
        self._write()
        if _is_called_by_dynamo():
            self.notes.leave_out(
                None, "steps", "optimizer.step is compiled: set Watch.step before each"
            )
        self._step += 1
        self._prepare()

    def _counts(self, optimizer):
        """Whether it is the one optimizer whose steps are counted: the first with a parameter of
        the model, or another where that has not stepped for long."""
        if self._optimizer() is optimizer:
            self._skipped = 0
            return True
        model = self._model()
        if model is None or (self._optimizer() is not None and self._skipped < 100):
            self._skipped += 1
            return False
        mine = {id(p) for p in model.parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._optimizer, self._skipped = weakref.ref(optimizer), 0
        return self._optimizer() is optimizer

    def _gradients(self):
        """{run: {part: norm}}, of those that share their parameters the first."""
        result, used = {}, set()
        for run in self._passes.runs:
            parameters = parameters_of(run.parts)
            if not parameters <= used or not parameters:
                used |= parameters
                made = self.notes.attempt(run.name, "gradient", norms, run.parts)
                result[run], why = made or ({}, "")
                if why:
                    self.notes.leave_out(run.name, "gradient", why)
        return result

    def _write(self):
        """Writes the row of the step, if it is due and something was measured."""
        if not self._passes.is_attached:
            return
        passes, gradients = self._passes, self._norms
        self._norms, label = None, self._step + self._first
        if passes.runs and gradients is None:
            gradients = self._gradients()
        runs, loss, why = passes.runs, passes.loss, passes.why
        self._passes.detach()
        self._last = label
        passes.restart()
        scalars = self.notes.attempt(None, "row", self._scalars, runs, gradients or {}) or {}
        self._missed = 0 if scalars else self._missed + 1
        if scalars:
            self.notes.reasons.pop((None, "every step"), None)
        elif self._missed >= 2:
            self.notes.leave_out(None, "every step", why)
        if loss is not None:
            scalars["loss"] = {-1: loss}
        if scalars:
            self.notes.attempt(None, "row", self._row, label, scalars)

    def _scalars(self, runs, gradients):
        """{name: {number of a layer: scalar}}."""
        self._number(runs)
        result: dict[str, dict[int, Any]] = {}
        for run in runs:
            number = self._number_of(run, runs)
            if number is None or not self._is_chosen(number):
                continue
            values = dict(run.scalars)
            if run.products:
                values |= self.notes.attempt(run.name, "weights", _combine_products, run) or {}
            values |= {f"{part}_gradient": v for part, v in gradients.get(run, {}).items()}
            for name, value in values.items():
                place = f"cross.{name}" if run.is_cross else name
                result.setdefault(place, {})[number] = value
        return result

    def _number(self, runs):
        """Numbers the layers that run for the first time, and those beside them that did not."""
        layers = [_layer_of(run, runs) for run in runs]
        new = dict.fromkeys((run.name, run.turn) for run in layers)
        new = [key for key in new if key not in self._names]
        modules = self._passes.names if new else {}
        place = {name: i for i, name in enumerate(modules.values())}
        by_name = {name: module for module, name in modules.items()}
        ran = {name for run in runs for name in run.names} | {name for name, _ in self._names}
        for module, name in modules.items():
            alike = [i for i, (n, turn) in enumerate(new) if not turn and _plain(n) == _plain(name)]
            alike = [i for i in alike if type(by_name[new[i][0]]) is type(module)]
            if name in ran or not alike or not self._selects(name, module):
                continue
            later = [i for i in alike if place[new[i][0]] > place[name]]
            new.insert(later[0] if later else alike[-1] + 1, (name, 0))
        self._names += new

    def _number_of(self, run, runs):
        layer = _layer_of(run, runs)
        return self._names.index((layer.name, layer.turn))

    def _row(self, label, scalars):
        values = torch.stack(
            [v.float().to("cpu") for own in scalars.values() for v in own.values()]
        )
        numbers = iter(values.tolist())
        row = {name: {i: next(numbers) for i in own} for name, own in scalars.items()}
        self._recorder.add(label, row, len(self._names), _is_first())


def _check(model, every, tokens, layers, mask):
    """Refuses what cannot be watched."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} is not a torch.nn.Module")
    if tokens not in TOKENS:
        raise ValueError(f"tokens={tokens!r} is not one of {TOKENS}")
    if type(every) is not int or every < 1:
        raise ValueError(f"every={every!r} is not a whole number of steps, 1 or more")
    if mask is not None and not callable(mask):
        raise ValueError(f"mask={mask!r} is not a function of (args, kwargs)")
    _check_layers(model, layers)
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError("a model under FullyShardedDataParallel is not measured")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise ValueError(
                f"{name} is a DTensor: a model under FSDP2 (fully_shard) or tensor parallelism is "
                "not measured"
            )


def _check_layers(model, layers):
    if layers is None or callable(layers):
        return
    every = list(layers) if _is_list(layers) else [layers]
    kinds = {type(layer) for layer in every}
    if kinds not in ({int}, {str}) or any(type(i) is int and i < 0 for i in every):
        raise ValueError(
            f"layers={layers!r} is not numbers, names of modules, or a function of (name, module)"
        )
    names = [plain_name(name) for name, _ in model.named_modules()]
    for layer in (layer for layer in every if isinstance(layer, str)):
        if layer not in names:
            raise struct.unknown_value_error(f"module {layer!r} of layers=", layer, names)


def _is_list(layers):
    return isinstance(layers, Sequence) and not isinstance(layers, str)


def _layer_of(run, runs):
    """The run whose number a run has: attention to other tokens has that of its block."""
    if run.is_cross:
        for frame in reversed(run.frames[1:]):
            layers = [r for r in runs if not r.is_cross and frame in r.frames]
            if layers:
                return layers[0] if len(layers) == 1 else run
    return run


def _plain(name):
    return re.sub(r"\d+", "*", name)


def _combine_products(run):
    """{name: mean over heads, the least and the largest beside it} of the products of a run."""
    frames = [frame for frame, _ in run.products]
    if len(set(frames)) < len(frames) and not run.is_split:
        raise LeftOut(f"{len(frames)} products in one run of it")
    values = {}
    for name in dict.fromkeys(name for _, scalars in run.products for name in scalars):
        every = [scalars[name].reshape(-1) for _, scalars in run.products if name in scalars]
        heads = torch.stack(every).mean(dim=0) if run.is_split else torch.cat(every)
        values[name] = heads.mean()
        if name == "attention_entropy":
            values |= {f"{name}_least": heads.min(), f"{name}_largest": heads.max()}
    return values


def _is_first():
    """Whether this is the first of torch's processes, which writes; or the only one."""
    several = distributed.is_available() and distributed.is_initialized()
    return not several or distributed.get_rank() == 0


class _Watches:
    """The watches of this process, for the two hooks of optimizers, which stay.

    They are replaced as one tuple, since optimizers of other threads read it.
    """

    lock, references = threading.Lock(), ()

    @classmethod
    def add(cls, watched):
        with cls.lock:
            alive = [ref for ref in cls.references if (own := ref()) is not None and own.is_open]
            cls.references = (*alive, weakref.ref(watched))

    @classmethod
    def call(cls, name, args):
        """A method of each, whose errors stay here."""
        for reference in cls.references:
            watched = reference()
            if watched is None or not watched.is_open or torch.compiler.is_compiling():
                continue
            try:
                getattr(watched, name)(*args)
            except Exception as error:
                watched.notes.leave_out(None, name, f"{type(error).__name__}: {error}")


register_optimizer_step_pre_hook(lambda *args: _Watches.call("before_step", args))
register_optimizer_step_post_hook(lambda *args: _Watches.call("after_step", args))


def _is_called_by_dynamo():
    """Whether the optimizer's step that is running was compiled."""
    frames, frame = 0, sys._getframe()
    while frame is not None and frames < 20:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame, frames = frame.f_back, frames + 1
    return False
