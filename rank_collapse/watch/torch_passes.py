"""What runs in a measured step: the attentions of its first forward pass, in order, as scalars.

Global forward hooks of torch see which modules run, and a mode sees the functions of torch. Both
are there in measured steps alone, so a model has no hook of its own: it is copied, saved and
compiled as one that is not watched.
"""

import functools
import inspect
import re
import string
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from rank_collapse.watch import torch_products as products
from rank_collapse.watch.recorder import LeftOut, Notes
from rank_collapse.watch.torch_gradients import Parts, choose_parts, parts_of_heads
from rank_collapse.watch.torch_origins import (
    PRODUCTS,
    Origins,
    Term,
    meet,
    read_product,
    tensors_in,
)
from rank_collapse.watch.torch_scalars import measure_tokens, measure_weights, plainly
from rank_collapse.watch.torch_tokens import Tokens, allowed_among, choose_term, read_tokens

SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
EXPONENTIALS = {torch.exp, Tensor.exp}
Select = Callable[[str, nn.Module], bool]


class Frame:
    """A module that runs now, its number among all that ran, and its call."""

    def __init__(self, number: int, module: nn.Module, name: str, args: Any, kwargs: Any):
        self.number, self.module, self.name = number, module, name
        self.args, self.kwargs = args, kwargs
        self.runs: list[Run] = []

    @functools.cached_property
    def masks(self) -> list[tuple[str, Tensor]]:
        """(name, argument [b, n]) of the call whose name has "mask" or "pad" in it."""
        try:
            forward = inspect.signature(self.module.forward)
            arguments = forward.bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            arguments = self.kwargs
        return [(name, a) for name, a in _named(arguments) if a.ndim == 2 and _is_mask(name)]


class Run:
    """One run of an attention on some tokens.

    Attributes:
        name: Of the module that it is credited to.
        is_cross: Whether keys are of other tokens.
        frames: Numbers of the modules around it, and its own.
        names: Also of modules that are other heads of it.
        turn: How often its module had run before.
        scalars: Of its tokens.
        products: [(number of a frame, {name: by head [h]}), ...], of each product.
        parts: What made queries, keys and values, of each product.
        pieces: (matrix, index, exists, starts) of each product, until its module ends.
        output: The last result of a module that has this attention alone.
    """

    def __init__(self, name: str, is_cross: bool, frames: tuple[int, ...], turn: int):
        self.name, self.is_cross, self.frames, self.turn = name, is_cross, frames, turn
        self.names = {name}
        self.scalars: dict[str, Tensor] = {}
        self.products: list[tuple[int, dict[str, Tensor]]] = []
        self.parts: list[Parts] = []
        self.pieces: list[Any] = []
        self.output: Tensor | None = None
        self.layout: Any = None
        self.is_split = False


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
        runs: Of the step, in order.
        loss: What the pass returned, if it did.
        why: Why nothing was measured.
    """

    def __init__(self, model: nn.Module, select: Select, tokens: str, mask: Any, notes: Notes):
        self._model, self._select, self._kind = weakref.ref(model), select, tokens
        self._mask, self._notes = mask, notes
        self._mode, self._handles, self._entered = Mode(self._see), [], False
        self._given: Any = None  # what `mask` gave for the call
        self.names: Any = weakref.WeakKeyDictionary()
        self.is_attached = False
        self.restart()

    def restart(self) -> None:
        """Forgets what was measured."""
        self.runs: list[Run] = []
        self.loss, self.why = None, "none of its modules ran"
        self._done: set[int] = set()
        self._number, self._thread, self._is_broken = 0, None, False
        self._streams: dict[str, str] = {}  # of an attention: the name of its stream
        self._masks: dict[str, str] = {}  # of a mask of the call: the stream that has it
        self._last: dict[str, Any] = {}  # of a stream: which tokens exist
        self._clear()

    def _clear(self):
        self._frames: list[Frame] = []
        self._ignored: Any = None
        self._open: dict[Any, Run] = {}
        self._origins = Origins(lambda: tuple(frame.number for frame in self._frames))

    def attach(self) -> None:
        """Begins to see modules, as they are named now."""
        self.names.clear()
        for name, module in self._model().named_modules():
            self.names[module] = plain_name(name)
        before, after = _Weak(self, "_before"), _Weak(self, "_after")
        self._handles = [
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        self.is_attached = True
        _Uncompiled.enter()

    def detach(self) -> None:
        """Ends it, and leaves what an interrupted pass had entered."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._leave()
        if self.is_attached:
            self.is_attached = False
            _Uncompiled.leave()

    def broken(self, error: Exception) -> None:
        """After an exception of its own: nothing else is measured in this step."""
        self._is_broken = True
        self._notes.leave_out(None, "everything", f"{type(error).__name__}: {error}")

    def _before(self, module, args):
        if module not in self.names:
            return
        mine = self._thread in (None, threading.get_ident())
        outermost = self._frames[0].module if self._frames else self._ignored
        if outermost is module and mine:  # which was left by an interrupt
            self._leave()
            self.restart()
            outermost = None
        if outermost is None:
            self._begin(module)
        if self._ignored is None and self._thread == threading.get_ident():
            self._number += 1
            kwargs = _keywords_of_call(module)
            self._frames.append(Frame(self._number, module, self.names[module], args, kwargs))
            if len(self._frames) == 1 and self._mask is not None:
                self._given = self._notes.attempt(None, "mask", self._mask, args, kwargs)

    def _begin(self, module):
        """Begins a pass, unless this module was measured in another one of the step."""
        self._thread = threading.get_ident()
        if id(module) in self._done or not self._wanted():
            self._ignored = module
            return
        self._handled = sys.exc_info()[1]
        self._mode.__enter__()
        self._entered = True

    def _wanted(self):
        model = self._model()
        if model is None or not model.training:
            self.why = "the model was in eval mode"
        elif not torch.is_grad_enabled():
            self.why = "it ran without gradients"
        else:
            self.why = "no product of weights and values was seen in it"
            return True
        return False

    def _after(self, module, args, *result):
        if self._thread != threading.get_ident() or module not in self.names:
            return
        if self._ignored is not None:
            self._ignored = None if self._ignored is module else self._ignored
            return
        failed = len(result) == 1  # as torch calls it after an exception
        output = None if failed else result[1]
        depth = [i for i, frame in enumerate(self._frames) if frame.module is module]
        if not depth:
            return
        try:
            with plainly():
                for frame in self._frames[: depth[-1] - 1 if depth[-1] else None : -1]:
                    self._finish(frame, output if frame.module is module else None, failed)
        finally:
            del self._frames[depth[-1] :]
            if not self._frames:
                self._end(output, failed)

    def _finish(self, frame, output, failed):
        """After a module: its tokens are measured, and what it gives is a new beginning."""
        self._done.add(id(frame.module))
        inside = [run for run in self.runs if frame.number in run.frames]
        if failed:  # it may be tried again
            self.runs = [run for run in self.runs if run not in inside]
            self._open = {key: run for key, run in self._open.items() if run not in inside}
            return
        for run in frame.runs:
            self._notes.attempt(run.name, "tokens", self._measure, run)
        if self._kind != "read":
            self._keep_output(frame, inside, output)
        tensors = [a for a in tensors_in(output) if a.is_floating_point()]
        if inside and frame is not self._frames[0]:
            self._origins.forget()
            for tensor in tensors:
                self._origins.begin(tensor, self._origins.tag(tensor).past)
        elif tensors and not self._origins.has(tensors[0]):  # by code that torch does not show
            self._origins.see_module(frame.module, (frame.args, frame.kwargs), tensors[0])

    def _measure(self, run):
        """Measures the tokens of a run, once its products are known."""
        pieces, run.pieces = run.pieces, []
        if run.is_cross or not pieces:
            return
        matrix, index, exists, starts = pieces[0]
        rows = torch.cat([piece[1].flatten() for piece in pieces])
        if len(pieces) > 1 and len(rows.unique()) == len(rows):  # one product for each document
            run.is_split, index = True, rows[None]
            ends = torch.tensor([piece[1].numel() for piece in pieces]).cumsum(0)[:-1]
            exists, starts = None, torch.zeros_like(index, dtype=torch.bool)
            starts[0, ends.to(starts.device)] = True
        if self._kind == "read":
            run.scalars = measure_tokens(matrix[index], exists, starts, "read")
        else:
            run.layout = index, exists, starts

    def _keep_output(self, frame, inside, output):
        """Keeps what a module with one attention puts out; the outermost such module counts."""
        layers = [run for run in inside if not run.is_cross]
        if len(layers) == 1 and frame is not self._frames[0]:
            tensors = [a for a in tensors_in(output) if a.is_floating_point() and a.ndim > 1]
            layers[0].output = tensors[0].detach() if tensors else None
            return
        for run in layers:
            if run.output is not None and run.layout is not None:
                self._notes.attempt(run.name, "tokens", self._measure_output, run)

    def _measure_output(self, run):
        (index, exists, starts), x, run.output = run.layout, run.output, None
        if x[..., 0].numel() != index.numel():
            raise LeftOut(f"a result of shape {tuple(x.shape)} has other tokens than it reads")
        if x.shape[:2] != index.shape or x.shape[0] == x.shape[1]:
            x = x.reshape(-1, x.shape[-1])[index]
        run.scalars = measure_tokens(x, exists, starts, self._kind)

    def _end(self, output, failed):
        """After the outermost module."""
        self._leave()
        if failed or (output is None and sys.exc_info()[1] is not self._handled):
            self.restart()
        elif self.loss is None:
            self.loss = self._notes.attempt(None, "loss", loss_of, output)

    def _leave(self):
        if self._entered and self._thread == threading.get_ident():
            self._mode.__exit__(None, None, None)
        self._entered = False
        self._clear()

    def _see(self, function, args, kwargs, result):
        """Takes what the mode passes."""
        mine = self._frames and self._thread == threading.get_ident()
        if not mine or self._is_broken or _is_traced():
            return
        try:
            with plainly():
                self._look(function, args, kwargs, result)
        except Exception as error:
            self.broken(error)

    def _look(self, function, args, kwargs, result):
        origins = self._origins
        if function is functional.scaled_dot_product_attention:
            self._attempt(self._see_dot, args, kwargs, result)
        elif function is functional.multi_head_attention_forward:
            self._attempt(self._see_heads, args, kwargs, result)
        elif function in PRODUCTS and self._is_weighted(function, args, kwargs):
            self._attempt(self._see_weighted, function, args, kwargs, result)
        else:
            origins.see(function, args, kwargs, result)
            if function in SOFTMAX and result.ndim > 2:
                origins.see_softmax(args, kwargs, result, products.HIDDEN)
            elif function in EXPONENTIALS:
                origins.see_exponential(args[0], result, products.HIDDEN)

    def _attempt(self, see, *args):
        """Measures a product; its result comes from no map, whatever happens."""
        name = self._frames[-1].name
        self._notes.attempt(name, "weights", see, *args)
        for tensor in tensors_in(args[-1]):
            past = self._origins.tag(tensor).past if tensor.is_floating_point() else None
            if past is not None and not past:
                self._origins.begin(tensor, past)

    def _is_weighted(self, function, args, kwargs):
        """Whether a product is one of weights and values."""
        product = read_product(function, args, kwargs)
        if product is None:
            return False
        tags = [self._origins.tag(a) for a in (product.first, product.second)]
        scored = [tag.scores is not None and tag.scores.number is not None for tag in tags]
        plain = [tag.scores is not None and bool(tag.scores.terms) for tag in tags]
        return any(scored) or (any(plain) and not any(tag.parameters for tag in tags))

    def _see_dot(self, args, kwargs, result):
        q, k, v = list(tensors_in([args, kwargs]))[:3]
        if q.is_nested:
            raise LeftOut("nested tensors")
        letters = string.ascii_lowercase[: q.ndim - 2]
        sizes = dict(zip(letters + "xy", (*q.shape[:-1], k.shape[-2]), strict=True))
        share = letters and k.shape[-3] != q.shape[-3]  # heads share keys
        of_key = (letters[:-1] + "g" if share else letters) + "yz"
        tags = [self._origins.tag(a) for a in (q, k, v)]
        term = Term((letters + "xz", of_key, letters + "xy"), sizes, *tags[:2])
        weights = products.weights_of_dot(*args, **kwargs)
        self._credit([term], weights, tags[2], result)

    def _see_heads(self, args, kwargs, result):
        named = products.bind_heads(args, kwargs)
        query, key = named["query"], named["key"]
        tags = [self._origins.tag(named[name]) for name in ("query", "key")]
        n, m = len(query), len(key)
        rows = torch.arange(query[..., 0].numel(), device=query.device)
        is_turned = query.ndim == 2 or not getattr(self._frames[-1].module, "batch_first", False)
        rows = rows.reshape(n, -1).T if is_turned else rows.reshape(-1, n)
        matrix = (query if is_turned else query.transpose(0, 1)).detach()
        is_same = tags[0] is tags[1] or meet(tags[0].origins, tags[1].origins) is not None
        weights = products.weights_of_heads(**named)
        keys = None
        if is_same and m == n:
            keys = functional.pad(rows, (0, weights.p.shape[-1] - m), value=-1)
        matrix = matrix.reshape(-1, query.shape[-1])
        tokens = Tokens(matrix, rows, keys, None, not is_same, (tags[0],))
        self._keep(tokens, weights, lambda frame: parts_of_heads(named), self._frames, result)

    def _see_weighted(self, function, args, kwargs, result):
        product = read_product(function, args, kwargs)
        first, second = (self._origins.tag(a) for a in (product.first, product.second))
        if first.scores is not None and second.scores is not None:
            raise LeftOut("several products of queries and keys are multiplied")
        used, scores, value, letters = product.first, first.scores, second, product.letters
        if scores is None:
            used, scores, value = product.second, second.scores, first
            letters = letters[1], letters[0], letters[2]
        if not scores.terms:
            raise LeftOut("its softmax is over something else than products of queries and keys")
        weights = products.weights_of_scores(products.keys_last(used, *letters), scores)
        if scores.number is None and not products.is_distribution(weights.p):
            raise LeftOut("its weights are no distribution over keys")
        self._credit(scores.terms, weights, value, result)

    def _credit(self, terms, weights, value, result):
        """Measures weights of the tokens that made their queries."""
        tokens = read_tokens(self._origins, terms, len(weights.p))
        term, _ = choose_term(terms)
        numbers = {number for origin in term.query.maps() for number in origin.frames}
        frames = [frame for frame in self._frames if frame.number in numbers]
        tags = term.query, term.key, value
        self._keep(tokens, weights, lambda frame: choose_parts(tags, tokens.sources, frame),
                   frames, result)  # fmt: skip

    def _keep(self, tokens, weights, choose, frames, result):
        """Credits a product to the innermost of some modules that has parameters."""
        owners = [f for f in frames if next(f.module.parameters(), None) is not None]
        if not owners:
            raise LeftOut("no module with parameters made its queries")
        owner = owners[-1]
        past = frozenset().union(*(tag.past for tag in tokens.sources))
        stream = next((self._streams[name] for name in past), None)
        stream = stream or f"{owner.name} {self._number}"
        self._streams.setdefault(owner.name, stream)
        self._origins.begin(result[0] if isinstance(result, tuple) else result, past | {owner.name})
        if not self._select(owner.name, owner.module):
            return
        run = self._run_of(owner, tokens, past)
        if run is None:
            return
        weights = _by_example(weights, tokens)
        exists, starts = self._existing(tokens, weights.allowed, stream)
        run.pieces.append((tokens.matrix, tokens.index, exists, starts))
        run.parts.append(choose(owner.number))
        shape = len(tokens.index), len(weights.p) // len(tokens.index)
        run.products.append((owner.number, measure_weights(weights, shape, exists, starts)))

    def _run_of(self, owner, tokens, past):
        """The run that a product is of; None where its module ran already on other tokens."""
        index = self._frames.index(owner)
        around = tuple(frame.number for frame in self._frames[: index + 1])
        key = tokens.sources, tokens.is_cross, re.sub(r"\d+", "*", owner.name), around[-2:-1]
        run = self._open.get(key)
        if run is None:
            again = [other for other in self.runs if other.name == owner.name]
            if again and owner.name not in past:
                return None
            run = self._open[key] = Run(owner.name, tokens.is_cross, around, len(again))
            self.runs.append(run)
        run.names.add(owner.name)
        if run not in owner.runs:
            owner.runs.append(run)
        return run

    def _existing(self, tokens, allowed, stream):
        """(Bool [e, n] or None, where documents begin or None): the tokens that exist."""
        shape = tokens.index.shape
        if tokens.is_cross:
            exists, starts = self._last.get(stream, (None, None))
            fits = all(a is None or a.shape == shape for a in (exists, starts))
            return exists if fits else None, starts if fits else None
        among = allowed_among(tokens, allowed)
        fits = functools.partial(products.fits_mask, allowed=among)
        if among is None and allowed is not None:  # of which keys are tokens nothing is known
            fits = torch.any
        exists, starts = self._mask_of_call(shape, fits, stream), None
        if among is not None:
            exists = products.real_tokens(among) if exists is None else exists
            exists = exists.expand(shape)
            starts = products.document_starts(among, exists)
        exists = None if exists is None or exists.all() else exists
        self._last[stream] = exists, starts
        return exists, starts

    def _mask_of_call(self, shape, fits, stream):
        """Bool [e, n] of the watched call, or of one inside it; None if none fits."""
        if self._mask is not None:
            mask = self._given
            return mask.bool() if isinstance(mask, Tensor) and mask.shape == shape else None
        for frame in self._frames:
            for name, mask in frame.masks:
                if mask.shape != shape or self._masks.get(name, stream) != stream:
                    continue
                is_added = mask.is_floating_point() and bool((mask <= 0).all())
                exists = products.is_allowed(mask) if is_added else mask > 0
                is_padding = "pad" in name and mask.dtype == torch.bool
                for side in (~exists, exists) if is_padding else (exists, ~exists):
                    if fits(side):
                        self._masks[name] = stream
                        return side
        return None


class _Uncompiled:
    """Compiled code runs as it is written while a watch measures."""

    lock, count, stance = threading.Lock(), 0, None

    @classmethod
    def enter(cls):
        with cls.lock:
            cls.count += 1
            if cls.count == 1:
                cls.stance = torch.compiler.set_stance("force_eager")

    @classmethod
    def leave(cls):
        with cls.lock:
            cls.count -= 1
            if cls.count == 0 and cls.stance is not None:
                cls.stance.__exit__(None, None, None)
                cls.stance = None


class _Weak:
    """A hook that keeps nothing alive, and raises nothing."""

    def __init__(self, passes, name):
        self._passes, self._name = weakref.ref(passes), name

    def __call__(self, *args):
        passes = self._passes()
        if passes is None or _is_traced():
            return
        try:
            getattr(passes, self._name)(*args)
        except Exception as error:
            passes.broken(error)


def _is_traced():
    """Whether torch compiles, traces, or is inside of `torch.func`."""
    is_compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return is_compiled or torch._C._functorch.peek_interpreter_stack() is not None


def _keywords_of_call(module):
    """The keyword arguments of a call, which torch does not pass to the hooks of all modules."""
    frame = sys._getframe()
    for _ in range(40):
        frame = frame.f_back
        if frame is None:
            break
        names = frame.f_locals
        if names.get("self") is module and isinstance(names.get("kwargs"), dict):
            return names["kwargs"]
    return {}


def _named(values):
    """(name, tensor) of mappings, also of those inside them."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from _named(value)


def _is_mask(name):
    return "mask" in name or "pad" in name


def _by_example(weights, tokens):
    """Weights in the order of examples, with `allowed` [e or 1, n, m] of any head."""
    order, e, g = tokens.order, len(tokens.index), len(weights.p)
    p = weights.p if order is None else weights.p[order]
    allowed = weights.allowed
    if allowed is not None and len(allowed) > 1 and (order is not None or len(allowed) != e):
        allowed = allowed.repeat_interleave(g // len(allowed), dim=0)
        allowed = allowed if order is None else allowed[order]
        allowed = allowed.unflatten(0, (e, -1)).any(dim=1)
    return weights._replace(p=p, allowed=allowed)


def plain_name(name: str) -> str:
    """The dotted name of a module without what compilation and parallel training put before it."""
    return re.sub(r"(^|\.)_orig_mod(?=\.|$)|^module(?=\.|$)", "", name).strip(".")


def loss_of(output: Any) -> Tensor | None:
    """Reads the loss that a model returns: "loss" of it, the tensor itself, or its one number."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    numbers = [a for a in tensors_in(output) if a.ndim == 0 and a.is_floating_point()]
    if isinstance(named, Tensor):
        numbers = [named] if named.numel() == 1 else []
    return numbers[0].detach().reshape(()) if len(numbers) == 1 else None
