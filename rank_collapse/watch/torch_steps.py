"""The open watches: what torch calls at each step of an optimizer, and how long steps take."""

import collections
import functools
import statistics
import threading
import time
import weakref
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.optim import optimizer as optimizers

REMOVED = (
    "the global hooks of torch's optimizers were removed: set Watch.step before each step, or call "
    "watch again"
)
CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl")
_TORCH_CALL = nn.Module.__call__


class StepTimes:
    """Durations of measured steps and of others, the last of each."""

    def __init__(self):
        self._seconds = {kind: collections.deque[float](maxlen=50) for kind in (False, True)}
        self._last: float | None = None

    def end_step(self, is_measured: bool) -> None:
        """Records the time of a step that ends now; the first step has no beginning."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds[is_measured].append(now - self._last)
        self._last = now

    def describe(self, every: int) -> str:
        """Reports the duration of a measured step in plain steps, and its part of the training
        time.

        Args:
            every: Number of steps from one measured step to the next.
        """
        if not all(self._seconds.values()):
            return "known after the second measured step and a plain one"
        plain = statistics.median(self._seconds[False])
        measured = statistics.median(self._seconds[True])
        ratio = measured / max(plain, 1e-9)
        share = (ratio - 1) / (ratio - 1 + every) if ratio > 1 else 0.0
        return f"a measured step took as long as {ratio:.1f} others, {share:.1%} of the time"


class OpenWatches:
    """The open watches, for optimizers and for the calls of modules.

    They are replaced as one tuple, since other threads read it. `call` is the function that calls
    modules, torch's own or another program's replacement.
    """

    lock, open, stance = threading.RLock(), (), None
    call, is_installed = nn.Module.__call__, False
    call_operator: Any = None  # that of torch, while a watch measures
    hooks: tuple[tuple[str, Any], ...] = ()  # (name of torch's dictionary, handle)

    @classmethod
    def change(cls, opened, closed):
        """Opens and closes watches; while one measures, compiled code runs without compilation.

        Args:
            opened, closed: Watches.
        """
        with cls.lock:
            if opened and not cls.has_hooks():
                cls.add_hooks()
            cls.open = tuple(w for w in (*cls.open, *opened) if w not in closed)
            is_measuring = any(watched.measured for watched in cls.open)
            if is_measuring and cls.stance is None:
                cls.stance = torch.compiler.set_stance("force_eager")
                if HigherOrderOperator.__call__ is not _call_operator:
                    cls.call_operator = HigherOrderOperator.__call__
                    HigherOrderOperator.__call__ = _call_operator
                if not cls.is_installed or nn.Module.__call__ is _TORCH_CALL:  # put back by others
                    cls.call, nn.Module.__call__ = nn.Module.__call__, _call_module
                    cls.is_installed = True
            elif not is_measuring and cls.stance is not None:
                if nn.Module.__call__ is _call_module:  # else somebody's that calls it
                    nn.Module.__call__, cls.is_installed = cls.call, False
                if HigherOrderOperator.__call__ is _call_operator:
                    HigherOrderOperator.__call__ = cls.call_operator
                cls.stance = cls.stance.__exit__(None, None, None)

    @classmethod
    def see_step(cls, method, args):
        """Calls a method of each watch; its errors do not reach the training.

        Args:
            method: Name of the method.
            args: Arguments of the call.
        """
        if torch.compiler.is_compiling():
            return
        for watched in cls.open:
            try:
                getattr(watched, method)(*args)
            except Exception as error:
                watched.notes.leave_out(None, "steps", f"{type(error).__name__}: {error}")

    @classmethod
    def has_hooks(cls):
        """Returns whether torch still calls the open watches at each step of an optimizer."""
        return bool(cls.hooks) and all(
            handle.id in getattr(optimizers, name, {}) for name, handle in cls.hooks
        )

    @classmethod
    def add_hooks(cls):
        """Asks torch to call the open watches at each step of an optimizer.

        Only torch refers to the hooks: where others clear its hooks, they are deleted, and
        `say_removed` warns.
        """
        for _, handle in cls.hooks:
            handle.remove()
        before, after = _StepHook("before_step"), _StepHook("after_step")
        cls.hooks = (
            ("_global_optimizer_pre_hooks", optimizers.register_optimizer_step_pre_hook(before)),
            ("_global_optimizer_post_hooks", optimizers.register_optimizer_step_post_hook(after)),
        )
        weakref.finalize(after, cls.say_removed).atexit = False

    @classmethod
    def say_removed(cls):
        """Warns if torch no longer calls the watches because others removed its hooks."""
        for watched in cls.open if not cls.has_hooks() else ():
            watched.notes.leave_out(None, "steps", REMOVED)


class _StepHook:
    """A hook to which only torch refers, so it is deleted when others remove it."""

    def __init__(self, method: str):
        self.method = method

    def __call__(self, *args: object) -> None:
        OpenWatches.see_step(self.method, args)


def _call_module(module, *args, **kwargs):
    """Calls a module through every watch that measures, in place of `Module.__call__`."""
    call = OpenWatches.call
    for measured in [watched.measured for watched in OpenWatches.open]:
        call = call if measured is None else functools.partial(measured.call, call)
    return call(module, *args, **kwargs)


def _call_operator(operator, *args, **kwargs):
    """Calls an operator of functions. Torch compiles control flow wherever it is called: without
    compilation the functions could not read a parameter."""
    is_eager = torch._dynamo.eval_frame._stance.stance == "force_eager"
    has_modes = torch._C._len_torch_function_stack() > 0  # which call the operator again
    is_flow = operator.name() in CONTROL_FLOW
    if not is_flow or not is_eager or has_modes or torch.compiler.is_compiling():
        return OpenWatches.call_operator(operator, *args, **kwargs)

    def call(args, kwargs):
        """Calls the operator, where torch compiles."""
        return operator(*args, **kwargs)

    call_module, nn.Module.__call__ = nn.Module.__call__, OpenWatches.call  # which torch compiles
    try:
        with torch.compiler.set_stance("default"):
            return torch.compile(call, backend="eager", fullgraph=True)(args, kwargs)
    finally:
        nn.Module.__call__ = call_module
