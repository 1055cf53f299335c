"""What runs in a measured step: which modules, and which products of weights and values in them.

Global forward hooks of torch see which modules run, and a mode sees the functions of torch. Both
are there in measured steps alone, so a model has no hook of its own: it is copied, saved and
compiled as one that is not watched.
"""

import functools
import re
import string
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from rank_collapse.watch import torch_products as products
from rank_collapse.watch.recorder import LeftOut, Notes
from rank_collapse.watch.torch_functions import PRODUCTS, floats_in, read_product, tensors_in
from rank_collapse.watch.torch_origins import Origins, Scores, Term
from rank_collapse.watch.torch_runs import Frame, Run, Runs, Select
from rank_collapse.watch.torch_scalars import compute_plainly
from rank_collapse.watch.torch_tokens import choose_term


class Mode(TorchFunctionMode):
    """Passes what runs to `see(function, arguments, keywords, result)`, and changes nothing."""

    def __init__(self, see: Any):
        super().__init__()
        self._see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list) or func is Tensor.__setitem__:
            self._see(func, args, kwargs or {}, result)
        return result


class Passes:
    """The forward passes of one step.

    Args:
        model: What is watched.
        select: Whether an attention counts, by its dotted name and the module.
        tokens: "read", "raw" or "unit".
        mask: mask(args, kwargs) of the watched call, Bool [b, n], which tokens exist; or None.
        notes: Of what is left out.

    Attributes:
        names: {module: its dotted name}, weakly.
        loss: What the pass returned, if it did.
        reason: Why nothing was measured.
    """

    def __init__(
        self,
        model: nn.Module,
        select: Select,
        tokens: str,
        mask: Callable[[Any, Any], Tensor] | None,
        notes: Notes,
    ):
        self._model, self._mask, self._notes = weakref.ref(model), mask, notes
        self._make_runs = functools.partial(Runs, select, tokens, mask is not None, notes)
        self._mode, self._is_entered, self._handles = Mode(self._see_function), False, []
        self.names: Any = weakref.WeakKeyDictionary()
        self.restart()

    def restart(self) -> None:
        """Drops what was measured."""
        self._runs = self._make_runs()
        self.loss, self.reason = None, "none of its modules ran"
        self._finished: set[int] = set()  # modules
        self._number, self._is_broken = 0, False
        self._clear_pass()

    def _clear_pass(self):
        self._frames: list[Frame] = []
        self._origins = Origins(lambda: tuple(frame.number for frame in self._frames))

    @property
    def runs(self) -> list[Run]:
        """Lists the attentions of the step, in order."""
        return self._runs.found

    @property
    def is_attached(self) -> bool:
        """Returns whether it sees the modules that run."""
        return bool(self._handles)

    def attach(self) -> None:
        """Registers hooks of all modules, by the names that they have now."""
        self.names.clear()
        for name, module in self._model().named_modules():
            self.names[module] = plain_name(name)
        enter = functools.partial(self._see_hook, self._enter_module)
        leave = functools.partial(self._see_hook, self._leave_module)
        self._handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        ]
        _Stance.change(1)

    def detach(self) -> None:
        """Removes the hooks, and leaves what an interrupted pass had entered."""
        self._leave_mode()
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            _Stance.change(-1)

    def _see_hook(self, see, module, *args):
        """Passes on a hook's call, of the thread whose pass is measured.

        Args:
            see: The method that takes it.
            module, *args: Of the hook.
        """
        is_other = self._frames and self._thread != threading.get_ident()
        if module in self.names and not is_other and not _is_traced():
            try:
                see(module, *args)
            except Exception as error:
                self._stop(error)

    def _stop(self, error):
        """Stops measuring in this step, after an exception of its own."""
        self._is_broken = True
        self._notes.leave_out(None, "everything", f"{type(error).__name__}: {error}")

    def _enter_module(self, module, args):
        if self._frames and self._frames[0].module is module:  # which was left by an interrupt
            self._leave_mode()
            self.restart()
        is_outermost = not self._frames
        if is_outermost:
            self._thread = threading.get_ident()
            if id(module) not in self._finished and self._is_measurable():
                self._mode.__enter__()
                self._is_entered = True
        self._number += 1
        kwargs = _find_keywords(module) if self._is_entered else {}
        frame = Frame(self._number, weakref.ref(module), self.names[module], args, kwargs)
        self._frames.append(frame)
        if is_outermost and self._is_entered and self._mask is not None:
            self._runs.mask = self._notes.attempt(None, "mask", self._mask, args, kwargs)

    def _is_measurable(self):
        if self._model() is None or not self._model().training:
            self.reason = "the model was in eval mode"
            return False
        has_gradients = torch.is_grad_enabled()
        unseen = "no product of weights and values was seen in it"
        self.reason = unseen if has_gradients else "it ran without gradients"
        return has_gradients

    def _leave_module(self, module, args, *outputs):
        """Ends a module, and those inside it whose end torch does not show.

        Args:
            module, args: Of the hook.
            *outputs: Keyword arguments and the output; the output alone after an exception.
        """
        depth = [i for i, frame in enumerate(self._frames) if frame.module is module]
        if not depth:
            return
        has_failed, output, is_measured = len(outputs) == 1, outputs[-1], self._is_entered
        ended = self._frames[depth[-1] :]
        del self._frames[depth[-1] :]
        is_outermost = not self._frames
        if is_outermost:
            self._leave_mode()
        if not is_measured:
            return
        self._finished |= {id(frame.module) for frame in ended}
        if has_failed and is_outermost:
            self.restart()
        elif has_failed:
            self._runs.drop_inside(ended[0])
        else:
            with compute_plainly():
                for frame in ended:
                    self._runs.end_call(frame)
                if not is_outermost:
                    self._end_layer(ended[0], output)
            if is_outermost and self.loss is None:
                self.loss = self._notes.attempt(None, "loss", read_loss, output)

    def _end_layer(self, frame, output):
        """Measures what a module with an attention gives, which is a new beginning.

        Args:
            frame: Of the module.
            output: What it gave.
        """
        tensors = [a for a in floats_in(output) if not a.is_complex()]
        if self._runs.list_inside(frame):
            self._runs.measure_output(frame, output)
            self._origins.forget_layer()
            for tensor in tensors:
                self._origins.begin(tensor, self._origins.tag(tensor).past)
        elif tensors and not self._origins.has(tensors[0]):  # by code that torch does not show
            self._origins.see_module(frame.module, (frame.args, frame.kwargs), tensors[0])

    def _leave_mode(self):
        if self._is_entered and self._thread == threading.get_ident():
            self._mode.__exit__(None, None, None)
        self._is_entered = False
        self._clear_pass()

    def _see_function(self, function, args, kwargs, result):
        """Takes what the mode passes."""
        if not self._frames or self._is_broken or _is_traced():
            return
        try:
            if function is functional.multi_head_attention_forward:
                self._see_heads(args, kwargs, result)
            else:
                with compute_plainly():
                    self._see_call(function, args, kwargs, result)
        except Exception as error:
            self._stop(error)

    def _see_call(self, function, args, kwargs, result):
        if function is functional.scaled_dot_product_attention:
            self._measure_product(self._see_dot, args, kwargs, result)
            return
        product = read_product(function, args, kwargs) if function in PRODUCTS else None
        if product is not None:
            tags = [self._origins.tag(factor) for factor in product[:2]]
            scores = [tag.scores or Scores() for tag in tags]
            is_plain = any(s.terms for s in scores) and not any(tag.parameters for tag in tags)
            if is_plain or any(s.is_softmax for s in scores):
                self._measure_product(self._see_weighted, product, scores, result)
                return
        self._origins.see_function(function, args, kwargs, result)

    def _measure_product(self, see, *args):
        """Measures a product that is not empty; its result comes from no map, whatever happens.

        Args:
            see: The method that measures it.
            *args: Its arguments, last the result of the product.
        """
        if all(tensor.numel() for tensor in floats_in(args[-1])):
            self._notes.attempt(self._frames[-1].name, "weights", see, *args)
        for tensor in floats_in(args[-1]):
            past = self._origins.tag(tensor).past
            if not past:
                self._origins.begin(tensor, past)

    def _see_heads(self, args, kwargs, result):
        """Computes `nn.MultiheadAttention` once more, so that what it calls is seen."""
        with torch.no_grad(), self._mode:
            again = products.attend_openly(args, kwargs)
        self._origins.begin(result[0], self._origins.tag(again).past)

    def _see_dot(self, args, kwargs, result):
        names = ("query", "key", "value")[len(args) :]
        q, k, v = *args[:3], *(kwargs[name] for name in names)
        if q.is_nested:
            raise LeftOut("nested tensors")
        axes = string.ascii_lowercase[: q.ndim - 2]
        sizes = dict(zip(axes + "xy", (*q.shape[:-1], k.shape[-2]), strict=True))
        shares_keys = axes and k.shape[-3] != q.shape[-3]  # heads in groups
        key_axes = (axes[:-1] + "g" if shares_keys else axes) + "yz"
        tags = [self._origins.tag(a) for a in (q, k, v)]
        term = Term((axes + "xz", key_axes, axes + "xy"), sizes, *tags[:2])
        weights = products.compute_dot_weights(*args, **kwargs)
        self._runs.add_product(self._frames, self._origins, term, weights, tags[2], result)

    def _see_weighted(self, product, scores, result):
        if all(s.terms or s.is_softmax for s in scores):
            raise LeftOut("several products of queries and keys are multiplied")
        if not (scores[0].terms or scores[0].is_softmax):
            product, scores = product.swap(), scores[::-1]
        if not scores[0].terms:
            raise LeftOut("its softmax is over something else than products of queries and keys")
        tag, value = (self._origins.tag(factor) for factor in product[:2])
        tensors = [product.first]
        for name in ("allowed", "softmax"):
            tensors.append(tag.followers[name]() if name in tag.followers else None)
        weights = products.read_weights(*tensors, product.letters)
        if not scores[0].is_softmax and not products.is_distribution(weights.p):
            raise LeftOut("its weights are no distribution over keys")
        term = choose_term(scores[0].terms)
        self._runs.add_product(self._frames, self._origins, term, weights, value, result)


class _Stance:
    """Compiled code runs as it is written while a watch measures."""

    lock, num_measuring, stance = threading.RLock(), 0, None

    @classmethod
    def change(cls, number):
        """Counts watches that begin or end to measure."""
        with cls.lock:
            cls.num_measuring += number
            if cls.num_measuring and cls.stance is None:
                cls.stance = torch.compiler.set_stance("force_eager")
            elif not cls.num_measuring:
                cls.stance = cls.stance.__exit__(None, None, None)


def _is_traced():
    """Returns whether torch compiles, traces, or is inside of `torch.func`."""
    is_compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return is_compiled or torch._C._functorch.peek_interpreter_stack() is not None


def _find_keywords(module):
    """Finds the keyword arguments of a call, which torch does not pass to hooks of all modules."""
    frame = sys._getframe()
    while frame is not None:
        names = frame.f_locals
        if names.get("self") is module and isinstance(names.get("kwargs"), dict):
            return names["kwargs"]
        frame = frame.f_back
    return {}


def plain_name(name: str) -> str:
    """Returns a module's dotted name without what compilation and DDP put before it."""
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)|^module(?=\.|$)", "", name).strip(".")


def read_loss(output: Any) -> Tensor | None:
    """Reads the loss that a model returns: "loss" of it, the tensor itself, or its one number."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    numbers = [a for a in tensors_in(output) if a.ndim == 0 and a.is_floating_point()]
    if isinstance(named, Tensor):
        numbers = [named] if named.numel() == 1 else []
    return numbers[0].detach().reshape(()) if len(numbers) == 1 else None
