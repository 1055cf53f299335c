"""What runs in a measured step: the attentions of its first forward pass, in order, as scalars.

Global forward hooks of torch see which modules run, and a mode sees the functions of torch. Both
are there in measured steps alone, so a model has no hook of its own: it is copied, saved and
compiled as one that is not watched.
"""

import dataclasses
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
from rank_collapse.watch.torch_gradients import choose_shares
from rank_collapse.watch.torch_origins import (
    PRODUCTS,
    Origins,
    Scores,
    Term,
    floats_in,
    read_product,
    tensors_in,
)
from rank_collapse.watch.torch_scalars import compute_plainly, measure_tokens, measure_weights
from rank_collapse.watch.torch_tokens import choose_term, find_allowed_tokens, read_tokens

Select = Callable[[str, nn.Module], bool]


@dataclasses.dataclass(eq=False)
class Frame:
    """A module that runs now, its number among all that ran, and its call.

    It is held weakly: after Ctrl-C in a pass its frames stay.
    """

    number: int
    reference: Callable[[], nn.Module]
    name: str
    args: Any
    kwargs: Any

    @property
    def module(self) -> nn.Module:
        """Returns the module."""
        return self.reference()

    @functools.cached_property
    def masks(self) -> list[tuple[str, Tensor]]:
        """Lists (name, argument [b, n]) of the call whose name has "mask" or "pad" in it."""
        try:
            forward = inspect.signature(self.module.forward)
            arguments = forward.bind(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            arguments = self.kwargs
        return [(name, a) for name, a in _name_masks(arguments) if a.ndim == 2]


@dataclasses.dataclass(eq=False)
class Run:
    """One run of an attention on some tokens.

    Attributes:
        name: Of the module that it is credited to.
        is_cross: Whether keys are of other tokens.
        frames: Numbers of the modules around it, and its own.
        turn: How often its module had run before.
        names: Also of modules that are other heads of it.
        scalars: Of its tokens.
        products: [(number of a frame, {name: by head [h]}), ...], of each product.
        shares: What made queries, keys and values, of each product.
        pieces: (matrix, index, documents) of each product, until its module ends.
        layout: (index, documents) of its tokens, until its output is measured.
        output: The last result of a module that has this attention alone.
        is_split: Whether each product is of documents of their own.
    """

    name: str
    is_cross: bool
    frames: tuple[int, ...]
    turn: int
    names: set[str] = dataclasses.field(default_factory=set)
    scalars: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    products: list[Any] = dataclasses.field(default_factory=list)
    shares: list[Any] = dataclasses.field(default_factory=list)
    pieces: list[Any] = dataclasses.field(default_factory=list)
    layout: Any = None
    output: Tensor | None = None
    is_split: bool = False


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
        reason: Why nothing was measured.
    """

    def __init__(self, model: nn.Module, select: Select, tokens: str, mask: Any, notes: Notes):
        self._model, self._select, self._kind = weakref.ref(model), select, tokens
        self._mask, self._notes = mask, notes
        self._mode, self._is_entered, self._handles = Mode(self._see_function), False, []
        self.names: Any = weakref.WeakKeyDictionary()
        self.is_attached = False
        self.restart()

    def restart(self) -> None:
        """Drops what was measured."""
        self.runs: list[Run] = []
        self.loss, self.reason = None, "none of its modules ran"
        self._finished: set[int] = set()  # modules
        self._number, self._is_broken = 0, False
        self._streams: dict[str, str] = {}  # {attention: the name of its stream of tokens}
        self._mask_streams: dict[str, str] = {}  # {mask of the call: the stream that has it}
        self._documents: dict[str, Any] = {}  # {stream of tokens: the document of each}
        self._clear_pass()

    def _clear_pass(self):
        self._frames: list[Frame] = []
        self._open_runs: dict[Any, Run] = {}
        self._origins = Origins(lambda: tuple(frame.number for frame in self._frames))

    def attach(self) -> None:
        """Registers hooks of all modules, by the names that they have now."""
        self.names.clear()
        for name, module in self._model().named_modules():
            self.names[module] = plain_name(name)
        before, after = _Hook(self, "_enter_module"), _Hook(self, "_leave_module")
        self._handles = [
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        self.is_attached = True
        _Stance.change(1)

    def detach(self) -> None:
        """Removes the hooks, and leaves what an interrupted pass had entered."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._leave_mode()
        if self.is_attached:
            self.is_attached = False
            _Stance.change(-1)

    def stop(self, error: Exception) -> None:
        """Stops measuring in this step, after an exception of its own."""
        self._is_broken = True
        self._notes.leave_out(None, "everything", f"{type(error).__name__}: {error}")

    def see_hook(self, name: str, *args: Any) -> None:
        """Passes on a hook's call, of the thread whose pass is measured.

        Args:
            name: Of the method that takes it.
            *args: Of the hook, first the module.
        """
        is_other = self._frames and self._thread != threading.get_ident()
        if args[0] in self.names and not is_other and not _is_traced():
            try:
                getattr(self, name)(*args)
            except Exception as error:
                self.stop(error)

    def _enter_module(self, module, args):
        if self._frames and self._frames[0].module is module:  # which was left by an interrupt
            self._leave_mode()
            self.restart()
        if not self._frames:
            self._thread = threading.get_ident()
            if id(module) not in self._finished and self._is_measurable():
                self._mode.__enter__()
                self._is_entered = True
        self._number += 1
        kwargs = _find_keywords(module) if self._is_entered else {}
        frame = Frame(self._number, weakref.ref(module), self.names[module], args, kwargs)
        self._frames.append(frame)
        if len(self._frames) == 1 and self._is_entered and self._mask is not None:
            self._call_mask = self._notes.attempt(None, "mask", self._mask, args, kwargs)

    def _is_measurable(self):
        if self._model() is None or not self._model().training:
            self.reason = "the model was in eval mode"
            return False
        has_gradients = torch.is_grad_enabled()
        unseen = "no product of weights and values was seen in it"
        self.reason = unseen if has_gradients else "it ran without gradients"
        return has_gradients

    def _leave_module(self, module, args, *result):
        has_failed = len(result) == 1  # as torch calls it after an exception
        output = None if has_failed else result[1]
        depth = [i for i, frame in enumerate(self._frames) if frame.module is module]
        if not depth:
            return
        try:
            with compute_plainly():
                for frame in self._frames[: depth[-1] - 1 if depth[-1] else None : -1]:
                    if self._is_entered:
                        self._finish_module(
                            frame, output if frame.module is module else None, has_failed
                        )
        finally:
            del self._frames[depth[-1] :]
            if not self._frames and self._is_entered:
                self._leave_mode()
                if has_failed:
                    self.restart()
                elif self.loss is None:
                    self.loss = self._notes.attempt(None, "loss", read_loss, output)

    def _finish_module(self, frame, output, has_failed):
        """Ends a module: its tokens are measured, and what it gives is a new beginning.

        Args:
            frame: The module.
            output: What it gave.
            has_failed: Whether it raised an exception.
        """
        self._finished.add(id(frame.module))
        inside = [run for run in self.runs if frame.number in run.frames]
        if has_failed:  # it may be tried again
            self.runs = [run for run in self.runs if run not in inside]
            self._open_runs = {key: r for key, r in self._open_runs.items() if r not in inside}
            return
        for run in inside:
            self._notes.attempt(run.name, "tokens", self._measure_run, run)
        tensors = [a for a in floats_in(output) if not a.is_complex()]
        is_outermost = frame is self._frames[0]
        if self._kind != "read":
            self._keep_output(inside, tensors, is_outermost)
        if inside and not is_outermost:
            self._origins.forget_inputs()
            for tensor in tensors:
                self._origins.begin(tensor, self._origins.tag(tensor).past)
        elif tensors and not self._origins.has(tensors[0]):  # by code that torch does not show
            self._origins.see_module(frame.module, (frame.args, frame.kwargs), tensors[0])

    def _measure_run(self, run):
        """Measures the tokens of a run, once its products are known."""
        pieces, run.pieces = run.pieces, []
        if run.is_cross or run.scalars or run.layout or not pieces:
            return
        matrix, index, documents = pieces[0]
        rows = torch.cat([piece[1].flatten() for piece in pieces])
        if len(pieces) > 1 and len(rows.unique()) == len(rows):  # one product for each document
            run.is_split, index = True, rows[None]
            numbers = [torch.full_like(piece[1], i).flatten() for i, piece in enumerate(pieces)]
            documents = torch.cat(numbers)[None]
        if self._kind == "read":
            run.scalars = measure_tokens(matrix[index], documents, "read")
        else:
            run.layout = index, documents

    def _keep_output(self, inside, tensors, is_outermost):
        """Keeps what a module with one attention puts out; the outermost such module counts.

        Args:
            inside: The runs inside the module.
            tensors: What it put out.
            is_outermost: Whether no other module runs.
        """
        layers = [run for run in inside if not run.is_cross]
        if len(layers) == 1 and not is_outermost:
            tensors = [a for a in tensors if a.ndim > 1]
            layers[0].output = tensors[0].detach() if tensors else None
            return
        for run in layers:
            if run.output is not None and run.layout is not None:
                self._notes.attempt(run.name, "tokens", self._measure_output, run)

    def _measure_output(self, run):
        (index, documents), x, run.output = run.layout, run.output, None
        if x[..., 0].numel() != index.numel():
            raise LeftOut(f"a result of shape {tuple(x.shape)} has other tokens than it reads")
        if x.shape[:2] != index.shape or x.shape[0] == x.shape[1]:
            x = x.reshape(-1, x.shape[-1])[index]
        run.scalars = measure_tokens(x, documents, self._kind)

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
                self._measure_product(self._see_heads, args, kwargs, result)
                return
            with compute_plainly():
                self._see_call(function, args, kwargs, result)
        except Exception as error:
            self.stop(error)

    def _see_call(self, function, args, kwargs, result):
        if function is functional.scaled_dot_product_attention:
            self._measure_product(self._see_dot, args, kwargs, result)
            return
        product = read_product(function, args, kwargs) if function in PRODUCTS else None
        if product is not None:
            tags = [self._origins.tag(factor) for factor in product[:2]]
            scores = [tag.scores or Scores((), False) for tag in tags]
            is_plain = any(s.terms for s in scores) and not any(tag.parameters for tag in tags)
            if is_plain or any(s.is_softmax for s in scores):
                self._measure_product(self._see_weighted, product, scores, result)
                return
        self._origins.see_function(function, args, kwargs, result)

    def _measure_product(self, see, *args):
        """Measures a product; its result comes from no map, whatever happens.

        Args:
            see: The method that measures it.
            *args: Its arguments, last the result of the product.
        """
        self._notes.attempt(self._frames[-1].name, "weights", see, *args)
        for tensor in floats_in(args[-1]):
            past = self._origins.tag(tensor).past
            if not past:
                self._origins.begin(tensor, past)

    def _see_heads(self, args, kwargs, result):
        """Computes queries and keys of `nn.MultiheadAttention` once more, so that they are seen."""
        with torch.no_grad(), self._mode:
            q, k, v, mask = products.project_heads(*args, **kwargs)
        with compute_plainly():
            self._see_dot((q, k, v, mask), {}, result)

    def _see_dot(self, args, kwargs, result):
        q, k, v = list(tensors_in([args, kwargs]))[:3]
        if q.is_nested:
            raise LeftOut("nested tensors")
        axes = string.ascii_lowercase[: q.ndim - 2]
        sizes = dict(zip(axes + "xy", (*q.shape[:-1], k.shape[-2]), strict=True))
        shares_keys = axes and k.shape[-3] != q.shape[-3]  # heads in groups
        key_axes = (axes[:-1] + "g" if shares_keys else axes) + "yz"
        tags = [self._origins.tag(a) for a in (q, k, v)]
        term = Term((axes + "xz", key_axes, axes + "xy"), sizes, *tags[:2])
        self._credit_product(term, products.compute_dot_weights(*args, **kwargs), tags[2], result)

    def _see_weighted(self, product, scores, result):
        if all(s.terms or s.is_softmax for s in scores):
            raise LeftOut("several products of queries and keys are multiplied")
        if not (scores[0].terms or scores[0].is_softmax):
            product, scores = product.swap(), scores[::-1]
        if not scores[0].terms:
            raise LeftOut("its softmax is over something else than products of queries and keys")
        tag, value = (self._origins.tag(factor) for factor in product[:2])
        followers = {"allowed": None, "softmax": None} | {n: f() for n, f in tag.followers.items()}
        tensors = product.first, followers["allowed"], followers["softmax"]
        weights = products.read_weights(
            *(a if a is None else products.move_keys_last(a, product.letters) for a in tensors)
        )
        if not scores[0].is_softmax and not products.is_distribution(weights.p):
            raise LeftOut("its weights are no distribution over keys")
        self._credit_product(choose_term(scores[0].terms), weights, value, result)

    def _credit_product(self, term, weights, value, result):
        """Measures a product, as one of the innermost module with parameters that made its queries.

        Args:
            term: The product of queries and keys.
            weights: Of queries and heads.
            value: Tag of the values.
            result: What the product gave.
        """
        tokens = read_tokens(term, len(weights.p))
        numbers = {number for linear_map in term.query.maps for number in linear_map.frames}
        owners = [
            frame
            for frame in self._frames
            if frame.number in numbers and next(frame.module.parameters(), None) is not None
        ]
        if not owners:
            raise LeftOut("no module with parameters made its queries")
        owner = owners[-1]
        past = frozenset().union(*(tag.past for tag in tokens.sources))
        stream = next((self._streams[name] for name in past), f"{owner.name} {self._number}")
        self._streams.setdefault(owner.name, stream)
        for tensor in floats_in(result)[:1]:
            self._origins.begin(tensor, past | {owner.name})
        is_selected = self._select(owner.name, owner.module)
        run = self._find_run(owner, tokens, past) if is_selected else None
        if run is None:
            return
        weights = products.sort_examples(weights, tokens.order, len(tokens.index))
        documents = self._find_documents(tokens, weights.allowed, stream)
        run.pieces.append((tokens.matrix, tokens.index, documents))
        tags = term.query, term.key, value
        run.shares.append(choose_shares(tags, tokens.sources, owner.number))
        shape = len(tokens.index), len(weights.p) // len(tokens.index)
        run.products.append((owner.number, measure_weights(weights, shape, documents)))

    def _find_run(self, owner, tokens, past):
        """Finds the run that a product is of; None if its module ran already on other tokens.

        Args:
            owner: Frame of the attention.
            tokens: Of the queries.
            past: Names of the attentions that these come from.
        """
        around = tuple(frame.number for frame in self._frames[: self._frames.index(owner) + 1])
        key = tokens.sources, tokens.is_cross, re.sub(r"\d+", "*", owner.name), around[-2:-1]
        if key not in self._open_runs:
            turn = sum(run.name == owner.name for run in self.runs)
            if turn and owner.name not in past:
                return None
            self._open_runs[key] = Run(owner.name, tokens.is_cross, around, turn)
            self.runs.append(self._open_runs[key])
        self._open_runs[key].names.add(owner.name)
        return self._open_runs[key]

    def _find_documents(self, tokens, allowed, stream):
        """Finds the document of each token, see `number_documents`.

        Args:
            tokens: Of the queries.
            allowed: Bool [e or 1, n, m], which key a query may attend to; None for all.
            stream: Name of the stream of tokens.
        """
        shape = tokens.index.shape
        if tokens.is_cross:
            documents = self._documents.get(stream)
            return documents if documents is None or documents.shape == shape else None
        among = find_allowed_tokens(tokens, allowed)
        fits = functools.partial(products.fits_mask, allowed=among)
        if among is None and allowed is not None:  # of which keys are tokens nothing is known
            fits = torch.any
        exists = self._find_mask(shape, fits, stream)
        if exists is None and among is not None:
            exists = products.find_tokens(among)
        documents = None
        if exists is not None:
            documents = products.number_documents(exists.expand(shape), among)
        self._documents[stream] = documents
        return documents

    def _find_mask(self, shape, fits, stream):
        """Finds Bool [e, n] of the watched call, or of one inside it; None if none fits.

        Args:
            shape: (e, n).
            fits: Whether a mask can be that of these tokens.
            stream: Name of the stream of tokens.
        """
        if self._mask is not None:
            mask = self._call_mask
            return mask.bool() if isinstance(mask, Tensor) and mask.shape == shape else None
        for name, mask in (pair for frame in self._frames for pair in frame.masks):
            if mask.shape != shape or self._mask_streams.get(name, stream) != stream:
                continue
            is_added = mask.is_floating_point() and bool((mask <= 0).all())
            exists = products.is_allowed(mask) if is_added else mask > 0
            is_padding = "pad" in name and mask.dtype == torch.bool
            for side in (~exists, exists) if is_padding else (exists, ~exists):
                if fits(side):
                    self._mask_streams[name] = stream
                    return side
        return None


class _Stance:
    """Compiled code runs as it is written while a watch measures."""

    lock, num_measuring, stance = threading.Lock(), 0, None

    @classmethod
    def change(cls, number):
        """Counts watches that begin or end to measure."""
        with cls.lock:
            cls.num_measuring += number
            if cls.num_measuring and cls.stance is None:
                cls.stance = torch.compiler.set_stance("force_eager")
            elif not cls.num_measuring:
                cls.stance = cls.stance.__exit__(None, None, None)


class _Hook:
    """A hook that keeps nothing alive."""

    def __init__(self, passes, name):
        self._passes, self._name = weakref.ref(passes), name

    def __call__(self, *args):
        passes = self._passes()
        if passes is not None:
            passes.see_hook(self._name, *args)


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


def _name_masks(arguments):
    """Yields (name, tensor) of masks in mappings, also of those inside them."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield from _name_masks(value)
        elif isinstance(value, Tensor) and re.search("mask|pad", str(name)):
            yield str(name), value


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
