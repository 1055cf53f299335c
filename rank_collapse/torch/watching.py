"""`watch` and `Watch`: which steps are measured, and the row of each."""

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rank_collapse.measures.spikes import TOKENS
from rank_collapse.measures.table import COLLAPSE
from rank_collapse.report.alarms import Alarm, alarms
from rank_collapse.torch import callbacks, gradients, logs
from rank_collapse.torch.notes import Notes
from rank_collapse.torch.passes import Passes
from rank_collapse.torch.processes import Processes, means_of, rank
from rank_collapse.torch.structure import Structure

_OF_MODELS: Any = weakref.WeakKeyDictionary()  # {model: its watches}: they live as long as it does


def watch(
    model: nn.Module,
    every: int = 100,
    log: Callable[..., Any] | str | Path | None = None,
    tokens: str = "read",
    layers: str | Sequence[int] | None = None,
) -> "Watch":
    """Measures a model at every so many steps of its optimizer, until `close` or the model's end.

    A step is one of the optimizer that has parameters of the model, of several the first that
    steps. Of the forward passes of a step (accumulated gradients) the first is measured. What
    cannot be measured is left out with a reason, in `Watch.describe()` and once as a warning;
    training is the same to the bit, and no error of measuring or writing reaches it. Under
    `torch.nn.parallel` the first process writes means over those that watch. The measured steps of
    a compiled model run without compilation (`torch.compiler.set_stance`).

    Args:
        model: Whose layers are in an `nn.ModuleList` or `nn.Sequential`, with modules that own
            projections of queries and keys; before or after `torch.compile` and
            `DistributedDataParallel`.
        every: Steps.
        log: log({name: number}, step=...), such as `trackio.log`, or `wandb.log`; or a path of JSON
            lines, as `rank_collapse.runs.metrics` has them, or its folder; None for `Watch.rows`
            alone.
        tokens: "read", what each layer's attention reads; "raw", the output of each layer; "unit",
            that with every token divided by its norm.
        layers: The dotted name of the layers, or of a part of the model that has them; or which of
            them; all by default.

    Returns:
        What watches: `rows`, `alarms`, `describe()`, `close()`, and callbacks `hf()` and
        `lightning()`.

    Raises:
        ValueError: Layers that are not found, with what was; another argument that is not as above;
            a model under FSDP or tensor parallelism.
    """
    return Watch(model, every, log, tokens, layers)


class Watch:
    """What measures a model; see `watch`.

    Attributes:
        rows: {"step": .., name: a number, or a list with one for each layer} of each measured step;
            NaN of a layer that was not measured. What attends to other tokens is "cross.name".
        alarms: The thresholds of `MEASURES` that were passed, each once.
    """

    def __init__(self, model, every, log, tokens, layers):
        if tokens not in TOKENS:
            raise ValueError(f"tokens={tokens!r} is not one of {TOKENS}")
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every!r} is not a whole number of steps, 1 or more")
        self._model, self._layers = weakref.ref(model), layers
        self._log, self._every, self._tokens = logs.checked(log), every, tokens
        self.rows: list[dict[str, Any]] = []
        self.alarms: list[Alarm] = []
        self.notes = Notes()
        structure = Structure(model, layers)
        self._passes = Passes(model, structure, tokens, self.notes)
        with_attention = {place.layer for place in structure.places.values()}
        for number in set(structure.chosen) - with_attention:
            why = f"a {structure.kinds[number]} owns no projections of queries and keys"
            self.notes.leave_out(number, "attention", why)
        self._name = f"{type(model).__name__}: {len(structure.names)} layers of {structure.where!r}"
        alike = [w for own in _OF_MODELS.values() for w in own if w._name == self._name]
        self._processes = Processes(f"{self._name}/{len(alike)}")
        self._step, self._first, self._last, self._missed = 0, 0, None, 0
        self._optimizer: Any = lambda: None  # a weak reference to the one that counts
        self._others, self._norms, self._attached = 0, None, False
        self.deferred: list[dict[str, Any]] | None = None  # rows that wait for a trainer's loss
        own = weakref.ref(self)
        handles = [
            register_optimizer_step_pre_hook(lambda *given: _call(own, "_before_step", given)),
            register_optimizer_step_post_hook(lambda *given: _call(own, "_after_step", given)),
        ]
        self._end = weakref.finalize(self, _remove, handles, self._passes)
        _OF_MODELS.setdefault(model, []).append(self)
        self._prepare()

    def close(self) -> None:
        """Ends it."""
        self._detach()
        self._end()
        own = _OF_MODELS.get(self._model(), [])
        if self in own:
            own.remove(self)

    @property
    def step(self) -> int:
        """Steps of the optimizer so far. Where torch sees none, as of a compiled step, set it."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        if value != self._step:
            if self._passes.found:
                self._write()
            self._step = int(value)
        self._prepare()

    def follow(self, step: int, first: int) -> None:
        """Takes a trainer's step, in whose count the first is 0 or 1."""
        self._first, self.step = first, step

    def describe(self) -> str:
        """What was last measured in each layer, and what is left out and why."""
        structure, reasons = self._passes.structure, self.notes.reasons
        last = self.rows[-1] if self.rows else {}
        lines = [f"{self._name}, every {self._every} steps, {len(self.rows)} rows"]
        lines += [f"  {what}: {why}" for (layer, what), why in reasons.items() if layer is None]
        count = max([len(structure.names), *(len(v) for v in last.values() if isinstance(v, list))])
        for number in range(count):
            found = [
                n for n, v in last.items() if isinstance(v, list) and not math.isnan(v[number])
            ]
            known = number < len(structure.names)
            what = structure.names[number] if known else "a further run"
            chosen = not known or number in structure.chosen
            text = ", ".join(found) or ("not measured yet" if chosen else "not chosen")
            out = "; ".join(f"no {w}: {why}" for (i, w), why in reasons.items() if i == number)
            lines.append(f"  {number} {what}: {text}" + (f" ({out})" if out else ""))
        return "\n".join(lines)

    __repr__ = describe

    def hf(self) -> Any:
        """A `transformers.TrainerCallback`: the Trainer's steps, loss and log; it closes."""
        return callbacks.of_transformers(self)

    def lightning(self) -> Any:
        """A `lightning.pytorch.Callback` that takes the trainer's steps, and closes."""
        return callbacks.of_lightning(self)

    def _is_due(self):
        own = self._step + self._first
        return self._last is None or own // self._every > self._last // self._every

    def _prepare(self):
        """Sees the modules of a step that is due, as they are now."""
        model = self._model()
        if self._attached or model is None or not self._end.alive or not self._is_due():
            return
        structure = self.notes.attempt(None, "layer", Structure, model, self._layers)
        if structure is not None:
            self._passes.structure = structure
            self._passes.restart()
            self._passes.attach()
            self._attached = True
            _Uncompiled.enter()

    def _detach(self):
        if self._attached:
            self._attached = False
            self._passes.detach()
            _Uncompiled.leave()

    def _before_step(self, optimizer, args, kwargs):
        """Takes the gradients, which some optimizers change; not where a closure makes them."""
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        scaled = getattr(optimizer, "grad_scale", None) is not None
        pending = self._attached and self._passes.found and not closure and not scaled
        if pending and self._counts(optimizer):
            self._norms = self._gradients()

    def _after_step(self, optimizer, args, kwargs):
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
            self._others = 0
            return True
        model = self._model()
        if model is None or (self._optimizer() is not None and self._others < 100):
            self._others += 1
            return False
        own = {id(p) for p in model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizer, self._others = weakref.ref(optimizer), 0
        return self._optimizer() is optimizer

    def _gradients(self):
        """{name: {layer: norm}} of the attentions that ran."""
        found: dict[str, dict[int, Any]] = {}
        for (layer, prefix), own in self._passes.ran.items():
            of = [a for ref in own if (a := ref()) is not None]
            what, given = f"{prefix}gradient", (of, self._passes.layouts)
            norms, why = self.notes.attempt(layer, what, gradients.norms_of, *given) or ({}, "")
            if why:
                self.notes.leave_out(layer, what, why)
            for part, norm in norms.items():
                found.setdefault(f"{prefix}{part}_gradient", {})[layer] = norm
        return found

    def _write(self):
        """The row of the step, if it is due and something was found."""
        if not self._attached:
            return
        passes, norms = self._passes, self._norms
        found: dict[str, dict[int, Any]] = {}
        self._norms, label = None, self._step + self._first
        if passes.found and norms is None:
            norms = self._gradients()
        found |= norms or {}
        for number, own in passes.found.items():
            for name, values in own.items():
                found.setdefault(name, {})[number] = torch.stack([v.float() for v in values]).mean()
        for number in passes.found:
            if "residual_ratio" not in passes.found[number] and self._tokens != "read":
                why = self.notes.reasons.get((number, "tokens"), "the layer is not called itself")
                self.notes.leave_out(number, "tokens", why)
        loss, why, count = passes.loss, passes.why, len(passes.structure.names)
        self._detach()
        self._last = label
        passes.restart()
        if not found:
            self._missed += 1
            if self._missed >= 2:
                self.notes.leave_out(None, "every step", why)
            return
        self._missed = 0
        self.notes.reasons.pop((None, "every step"), None)
        if loss is not None:
            found["loss"] = {-1: loss.float()}
        self.notes.attempt(None, "row", self._row, label, found, count)

    def _row(self, label, found, count):
        values = torch.stack([v.to("cpu") for own in found.values() for v in own.values()])
        numbers = iter(values.tolist())
        own = {name: {i: next(numbers) for i in by} for name, by in found.items()}
        means = means_of(self._processes.gathered(label, own))
        count = max([count, *(i + 1 for by in means.values() for i in by)])
        row: dict[str, Any] = {"step": label}
        for name, by in means.items():
            every = [by.get(i, math.nan) for i in range(count)]
            row[name] = by.get(-1, every)
        self.rows.append(row)
        if rank() == 0 and self.deferred is not None:
            self.deferred.append(row)
        elif rank() == 0:
            self.report(row)

    def report(self, row: dict[str, Any]) -> None:
        """Alarms of a row, and its way to the log."""
        said = {(alarm.metric, alarm.threshold) for alarm in self.alarms}
        for alarm in alarms([row], COLLAPSE):
            if (alarm.metric, alarm.threshold) not in said:
                self.alarms.append(alarm)
                self.notes.warn(alarm)
        values = {name: value for name, value in row.items() if name != "step"}
        self.notes.attempt(None, "line of the log", logs.write, self._log, row["step"], values)


class _Uncompiled:
    """Compiled code runs as it is written while a watch measures."""

    count, stance = 0, None

    @classmethod
    def enter(cls):
        cls.count += 1
        if cls.count == 1:
            cls.stance = torch.compiler.set_stance("force_eager")

    @classmethod
    def leave(cls):
        cls.count -= 1
        if cls.count == 0 and cls.stance is not None:
            cls.stance.__exit__(None, None, None)
            cls.stance = None


def _remove(handles, passes):
    for handle in handles:
        handle.remove()
    passes.detach()


def _call(own, name, given):
    """A method of a watch, if it is there, whose errors stay here."""
    watched = own()
    if watched is None or torch.compiler.is_compiling():
        return
    try:
        getattr(watched, name)(*given)
    except Exception as error:
        watched.notes.leave_out(None, name, f"{type(error).__name__}: {error}")


def _is_called_by_dynamo():
    """Whether the optimizer's step that is running was compiled."""
    frames, frame = 0, sys._getframe()
    while frame is not None and frames < 20:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame, frames = frame.f_back, frames + 1
    return False
