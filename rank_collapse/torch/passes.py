"""What runs: forward passes of a model, the layers and attentions in them, and what they gave.

Global forward hooks of torch see every module, in steps that are measured alone. So a model has no
hook of its own: it is copied, saved and compiled as one that is not watched.
"""

import inspect
import re
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from rank_collapse.torch import gradients, scalars
from rank_collapse.torch.notes import LeftOut, Notes
from rank_collapse.torch.products import Product, Products, Seen, allowed, existing
from rank_collapse.torch.structure import Place, Structure, width_of

# Arguments of an attention from which keys are made where they are not of the tokens that ask.
_CONTEXT = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "context"}
_CONTEXT |= {"memory", "cross_states", "encoder_output", "kv"}


class Frame:
    """A layer or an attention that runs now; `number` is that of the layer."""

    def __init__(self, module: nn.Module, number: int, place: Place | None):
        self.module, self.number, self.place = module, number, place
        self.seen, self.projected = Seen(), None
        self.inside: list[int] = []  # numbers that were measured meanwhile


class Passes:
    """The forward passes of one step, and the scalars of the first of each layer.

    Attributes:
        found: {number of a layer: {name: scalars}}. A layer that runs again in one pass gets a
            further number, by so many as there are layers.
        ran: {(layer, prefix of its names): weak references to the attentions that ran}.
        loss: What the pass returned, if it did.
        why: Why nothing was found.
    """

    def __init__(self, model: nn.Module, structure: Structure, tokens: str, notes: Notes):
        self.structure, self._tokens, self._notes = structure, tokens, notes
        self._model = weakref.ref(model)
        self._mode, self._handles = Products(self._see), []
        self.layouts: Any = weakref.WeakKeyDictionary()
        self._turned: Any = weakref.WeakKeyDictionary()  # attentions that read [n, b, d]
        self._around: list[int] = []  # ids of modules that run, which it keeps alive no more
        self._frames: list[Frame] = []
        self._inside, self._busy = 0, False
        self.restart()

    def restart(self) -> None:
        """Forgets what was found."""
        self.found: dict[int, dict[str, list[Tensor]]] = {}
        self.ran: dict[tuple[int, str], list[Any]] = {}
        self.loss, self.why = None, "none of its layers ran, as a module that is called"
        self._counts: dict[int, int] = {}
        self._done: set[int] = set()
        # of a layer: the width of tokens, whether they are [n, b, d], and which exist
        self._tokens_of: dict[int, Any] = {}
        self._owners: dict[tuple[int, str], str] = {}
        self._backward: list[bool] = []  # whether one has come to what was measured

    def attach(self) -> None:
        """Begins to see modules."""
        self._thread = threading.get_ident()
        before, after = _Weak(self, "_before"), _Weak(self, "_after")
        self._handles = [
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def detach(self) -> None:
        """Ends it, and leaves what an interrupted pass had entered."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._leave()

    def broken(self, error: Exception) -> None:
        """After an exception of its own: nothing more is measured."""
        self.detach()
        self._notes.leave_out(None, "everything", f"{type(error).__name__}: {error}")

    def _before(self, module, args):
        structure = self.structure
        if module in structure.around:
            self._begin(module)
        number, place = structure.blocks.get(module), structure.places.get(module)
        if (number is None and place is None) or not self._is_measured(module):
            return
        if number is not None:
            self._push(module, number + self._round(module), None)
        if place is not None:
            outer = [frame.number for frame in self._frames if frame.place is None]
            own = outer[-1] if outer else place.layer + self._round(module)
            self._push(module, own, place)

    def _begin(self, module):
        if id(module) in self._around:  # which was left by an interrupt
            self._leave()
        if not self._around:
            if any(self._backward) and not gradients.has_gradients(self.structure.places):
                self.restart()  # its step was skipped
            self._counts, self._handled = {}, sys.exc_info()[1]
            self._in_pass = self._wanted()
        self._around.append(id(module))

    def _wanted(self):
        model = self._model()
        if model is None or not model.training:
            self.why = "the model was in eval mode"
        elif not torch.is_grad_enabled():
            self.why = "it ran without gradients"
        return model is not None and model.training and torch.is_grad_enabled()

    def _is_measured(self, module):
        wanted = self._in_pass if self._around else self._wanted()
        return wanted and id(module) not in self._done

    def _round(self, module):
        """What is added to a layer's number when it runs again."""
        return self._counts.get(id(module), 0) * len(self.structure.names)

    def _push(self, module, number, place):
        self._frames.append(Frame(module, number, place))
        if place is not None:
            self._inside += 1
            if self._inside == 1:
                self._mode.__enter__()

    def _after(self, module, args, *rest):
        kwargs, output = ({}, None) if len(rest) == 1 else rest
        failed = len(rest) == 1  # as torch calls it after an exception
        frames = self._frames
        if frames and self.structure.together.get(module) is frames[-1].module:
            frames[-1].projected = output
        while frames and frames[-1].module is module:
            self._pop(args, kwargs, output, failed)
        if self._around and self._around[-1] == id(module):
            self._around.pop()
            if not self._around:
                self._end(output, failed)

    def _pop(self, args, kwargs, output, failed):
        frame = self._frames.pop()
        if frame.place is not None:
            self._inside -= 1
            if self._inside == 0:
                self._mode.__exit__(None, None, None)
        if failed:  # it may be tried again
            for number in (*frame.inside, frame.number):
                self.found.pop(number, None)
            return
        for outer in self._frames:
            outer.inside.append(frame.number)
        self._counts[id(frame.module)] = self._counts.get(id(frame.module), 0) + 1
        if not self._around:
            self._done.add(id(frame.module))
        self._busy, number = True, frame.number
        try:
            with scalars.plainly():
                if frame.place is not None:
                    self._attended(frame, args, kwargs)
                elif self._tokens != "read":
                    found = self._notes.attempt(number, "tokens", self._wrote, number, output)
                    self._keep(number, "", found)
        finally:
            self._busy = False

    def _end(self, output, failed):
        if failed or (output is None and sys.exc_info()[1] is not self._handled):
            self.restart()
        elif self._in_pass:
            self._done |= self._counts.keys()
            if self.loss is None:
                self.loss = self._notes.attempt(None, "loss", loss_of, output)

    def _leave(self):
        if self._inside:
            self._mode.__exit__(None, None, None)
        self._around, self._frames, self._inside = [], [], 0

    def _see(self, *given):
        if not self._busy and self._frames and self._frames[-1].place is not None:
            self._busy = True
            frame = self._frames[-1]
            try:
                with scalars.plainly():
                    self._notes.attempt(frame.number, "weights", frame.seen.see, *given)
            finally:
                self._busy = False

    def _attended(self, frame, args, kwargs):
        """Measures an attention that has run."""
        attention, number, attempt = frame.module, frame.number, self._notes.attempt
        width = width_of(attention)
        x = scalars.tokens_in([args, kwargs], width)
        shape = () if x is None else tuple(x.shape)
        self._listen([args, kwargs])
        product = attempt(number, "weights", frame.seen.product, shape)
        turned = self._is_turned(attention, shape, product)
        given = _arguments(attention, args, kwargs)
        is_cross = _is_cross(x, given, product)
        if not is_cross:
            self._tokens_of[number] = width, turned, _exists(product, given, shape)
        mask = self._mask_of(number, product)
        prefix = self._prefix(number, frame.place, is_cross)
        self.ran.setdefault((frame.place.layer, prefix), []).append(weakref.ref(attention))
        if self._tokens == "read" and "residual_ratio" not in self.found.get(number, {}):
            how = number, x, width, turned, mask
            self._keep(number, "", attempt(number, "tokens", self._measured, *how))
        if product is not None:
            found = attempt(number, f"{prefix}weights", scalars.of_weights, product, mask)
            self._keep(number, prefix, found)
            if frame.projected is not None and attention not in self.layouts:
                layout = gradients.layout_of(frame.projected, product, turned)
                if layout is not None:
                    self.layouts[attention] = layout

    def _wrote(self, number, output):
        """Scalars of the tokens that a layer puts out."""
        width, turned, mask = self._tokens_of.get(number, (None, False, None))
        x = scalars.tokens_in(output, width)
        return self._measured(number, x, width, turned, mask)

    def _measured(self, number, x, width, turned, mask):
        if x is None:
            raise LeftOut("no tokens [b, n, d] are among its arguments or results")
        x = scalars.batch_of(x, width, turned)
        fits = mask is not None and mask.shape == x.shape[:2]
        return scalars.of_tokens(x, mask if fits else None, self._tokens)

    def _keep(self, number, prefix, found):
        own = self.found.setdefault(number, {})
        for name, value in (found or {}).items():
            own.setdefault(prefix + name, []).append(value)

    def _prefix(self, number, place, is_cross):
        """Of the names of an attention's scalars: of a layer's second one its own name."""
        prefix, alike = "cross." if is_cross else "", re.sub(r"\d+", "*", place.name)
        first = self._owners.setdefault((number, prefix), alike)  # heads in a list are one
        return prefix if first == alike else f"{alike}."

    def _is_turned(self, attention, shape, product):
        if isinstance(attention, nn.MultiheadAttention):
            return not attention.batch_first and len(shape) == 3
        if product is not None and len(shape) == 3:
            own = len(product.weights), product.count
            if shape[:2] in (own, own[::-1]) and shape[0] != shape[1]:
                self._turned[attention] = shape[:2] != own
        return self._turned.get(attention, False)

    def _mask_of(self, number, product):
        """Bool [b, n], which of the tokens that ask exist; None for all."""
        mask = self._tokens_of.get(number, (None, False, None))[2]
        if product is None:
            return mask
        if mask is None or mask.shape != (len(product.weights), product.count):
            return product.queries
        return mask if product.queries is None else mask & product.queries

    def _listen(self, values):
        """Learns when a backward pass has come to what was measured."""
        if not self._backward:
            x = next((a for a in scalars.tensors_in(values) if a.requires_grad), None)
            if x is not None:
                self._backward.append(False)
                seen = self._backward
                x.register_hook(lambda _: seen.__setitem__(0, True))


class _Weak:
    """A hook that keeps nothing alive, and raises nothing."""

    def __init__(self, passes, name):
        self._of, self._name = weakref.ref(passes), name

    def __call__(self, *args):
        passes = self._of()
        if passes is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside torch.func
            return
        if threading.get_ident() != passes._thread:
            return
        try:
            getattr(passes, self._name)(*args)
        except Exception as error:
            passes.broken(error)


def loss_of(output: Any) -> Tensor | None:
    """The loss that a model returns: "loss" of it, the tensor itself, or the one number in it."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    numbers = [a for a in scalars.tensors_in(output) if a.ndim == 0 and a.is_floating_point()]
    if isinstance(named, Tensor):
        numbers = [named] if named.numel() == 1 else []
    return numbers[0].detach().reshape(()) if len(numbers) == 1 else None


def _arguments(attention, args, kwargs):
    """{name: argument} of a call."""
    try:
        return inspect.signature(attention.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return kwargs


def _is_cross(x, given, product):
    """Whether keys are of other tokens than queries."""
    query, key = given.get("query"), given.get("key")
    if isinstance(query, Tensor) and isinstance(key, Tensor) and query is not key:
        return query.shape != key.shape or not torch.equal(query, key)
    other = [given.get(name) for name in _CONTEXT]
    if any(isinstance(a, Tensor) and a.ndim == 3 and a is not x for a in other):
        return True
    return product is not None and product.weights.shape[-1] < product.count


def _exists(product: Product | None, given: Any, shape: Any) -> Tensor | None:
    """Bool [b, n], the tokens that some token may attend to; None for all."""
    if product is not None:
        return None if product.keys is None else product.keys[:, -product.count :]
    for mask in (a for name, a in given.items() if "mask" in name and isinstance(a, Tensor)):
        if mask.ndim == 4 and mask.shape[-1] >= shape[1]:
            return existing(allowed(mask))[0][:, -shape[1] :].expand(shape[0], -1)
        if mask.ndim == 2 and mask.shape == shape[:2]:
            return mask > 0 if (mask > 0).any() else allowed(mask)  # floats may be 0 and 1 too
    return None
