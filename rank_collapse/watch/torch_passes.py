"""What runs in a measured step: which modules, and which products of weights and values in them.

Only in measured steps `torch_watch` calls modules by `Pass.call`, which sees the functions of
torch. The model has no hooks, so it can be copied, saved and compiled as usual.
"""

import contextlib
import functools
import string
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rank_collapse.watch import torch_products as products
from rank_collapse.watch.recorder import LeftOut, Notes
from rank_collapse.watch.torch_arrivals import Arrivals
from rank_collapse.watch.torch_frames import Frame
from rank_collapse.watch.torch_functions import MAPS, floats_in, read_product, tensors_in
from rank_collapse.watch.torch_hidden import TRANSFORMED, HiddenCalls, is_transformed
from rank_collapse.watch.torch_models import is_sharded, plain_name
from rank_collapse.watch.torch_origins import Origins
from rank_collapse.watch.torch_runs import Runs, Select
from rank_collapse.watch.torch_tags import Term
from rank_collapse.watch.torch_tokens import choose_term
from rank_collapse.watch.torch_weights import (
    begin_mean,
    is_weights,
    read_choice,
    read_linear_attention,
    read_terms,
    read_weights,
    split_nested,
)

_DOT_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_HEADS = functional.multi_head_attention_forward
_SHOWN_HEADS = types.FunctionType(  # the same code, which does not hide what it calls from modes
    _HEADS.__code__, vars(functional) | {"has_torch_function": lambda tensors: False}
)
_SHOWN_HEADS.__kwdefaults__, _SHOWN_HEADS.__defaults__ = _HEADS.__kwdefaults__, _HEADS.__defaults__


class Pass(TorchFunctionMode):
    """The measured forward pass of one step, as a mode; other passes of the step are not measured.

    A pass whose gradients were dropped is not of the step: the next one is measured in its place.

    Args:
        model: A weak reference to the watched model.
        select: Whether an attention counts, by its dotted name and the module.
        tokens: "read", "raw" or "unit".
        mask: mask(args, kwargs) of the watched call, Bool [b, n], which tokens exist; or None.
        notes: Notes about metrics that are left out.

    Attributes:
        runs: The attentions.
        loss: Loss that the pass returned, if any.
        reason: Why nothing was measured.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        select: Select,
        tokens: str,
        mask: Callable[[Any, Any], Tensor] | None,
        notes: Notes,
    ):
        super().__init__()
        self._model, self._mask, self._notes = model, mask, notes
        self._names: Any = weakref.WeakKeyDictionary()
        self._read_names()
        self._begin_runs = functools.partial(Runs, select, tokens, mask is not None, notes)
        self.reason = "none of its modules ran"
        self._begin()
        self._hidden = HiddenCalls(notes)
        self._number, self._is_measured = 0, False
        self._frames: list[Frame] = []  # of the modules that run
        self._origins = self._begin_origins()

    def call(
        self, call: Callable[..., Any], module: nn.Module, *args: object, **kwargs: object
    ) -> Any:
        """Calls a module, and measures the attentions that run in it.

        Args:
            call: call(module, *args, **kwargs).
            module, *args, **kwargs: The module and its arguments.
        """
        is_other = self._frames and self._thread != threading.get_ident()
        if not self._frames and module in self._names:
            self._read_names()  # modules may be new
            if is_transformed():
                self.reason = f"it {TRANSFORMED}"
        if module not in self._names or is_other or _is_traced():
            return call(module, *args, **kwargs)
        is_outermost, self._number = not self._frames, self._number + 1
        frame = Frame(self._number, module, self._names[module], args, kwargs)
        self._frames.append(frame)
        if is_outermost:
            self._thread = threading.get_ident()
            if self._finished and self._notes.attempt(None, "restart", self._is_dropped):
                self._begin()
            self._is_measured = id(module) not in self._finished and self._is_measurable()
            if self._is_measured and self._mask is not None:
                self.runs.masks.watch_mask = self._notes.attempt(
                    None, "mask", self._mask, args, kwargs
                )
        try:
            with self if is_outermost and self._is_measured else contextlib.nullcontext():
                output = call(module, *args, **kwargs)
        except BaseException:
            self.runs.drop_inside(frame)
            raise
        finally:
            self._frames.pop()
            if is_outermost:
                self._origins = self._begin_origins()
        if self._is_measured:
            self._finished.add(id(module))
            self._measure(self._end_call, frame, output)
            if is_outermost and self.loss is None:
                self.loss = self._notes.attempt(None, "loss", read_loss, output)
            if is_outermost:
                self._measure(self._expect_gradients)
        return output

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Runs a function of torch in the measured pass, and records or measures it.

        torch calls this for every function while the mode is on. `multi_head_attention_forward`
        hides the functions that it calls from modes; its copy, which does not, runs in its place
        with the same results.

        Args:
            func, args, kwargs: The function and its arguments.
            types: Types of the arguments, which are not used.
        """
        if func is _HEADS:
            with self:
                return _SHOWN_HEADS(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if self._is_measured:
            name = self._frames[-1].name
            self._notes.attempt(
                name, "hidden layer", self._hidden.see, name, func, (args, kwargs), result
            )
        if isinstance(result, Tensor | tuple | list) or func is Tensor.__setitem__:
            self._measure(self._see_call, func, args, kwargs or {}, result)
        return result

    def _begin(self):
        """Begins the pass, or another one in its place."""
        self.runs, self.loss = self._begin_runs(), None
        self._finished: set[int] = set()  # ids of modules
        self._arrivals, self._is_broken = Arrivals(), False

    def _expect_gradients(self):
        """Waits for the gradients of the model, unless each process keeps parts of them."""
        model = self._model()
        if model is not None and not is_sharded(model):
            self._arrivals.expect(model.parameters())

    def _is_dropped(self):
        """Returns whether a pass begins that trains, after the gradients of the measured one were
        dropped."""
        model = self._model()
        is_training = model is not None and model.training and torch.is_grad_enabled()
        return is_training and self._arrivals.are_dropped()

    def _read_names(self):
        """Reads the dotted name of every module of the model."""
        model = self._model()
        if model is not None:
            for name, module in model.named_modules():
                self._names[module] = plain_name(name)

    def _begin_origins(self):
        """Returns an empty record of where tensors come from; the model's buffers count as
        constants."""
        model = self._model()
        return Origins(self._frames, () if model is None else model.buffers())

    def _is_measurable(self):
        """Returns whether this pass is measured, and notes the reason to give if nothing is
        seen."""
        if self._model() is None or not self._model().training:
            self.reason = "the model was in eval mode"
        elif torch.is_grad_enabled():
            self.reason = "no product of weights and values was seen in it"
            return True
        else:
            self.reason = "it ran without gradients"
        return False

    def _measure(self, measure, *args):
        """Calls a method in a measured pass; its own exception ends the measuring of this step.

        Args:
            measure, *args: Method and its arguments.
        """
        if not self._is_measured or self._is_broken or _is_traced():
            return
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                measure(*args)
        except Exception as error:
            self._is_broken = True
            self._notes.leave_out(None, "everything", f"{type(error).__name__}: {error}")

    def _end_call(self, frame, output):
        """Measures the output of a module's call; the output of a layer begins a new layer.

        Args:
            frame: Frame of the call.
            output: Output of the module.
        """
        self.runs.end_call(frame)
        if not self._frames:
            self.runs.masks.end_pass()
            return
        tensors = [a for a in floats_in(output) if not a.is_complex()]
        if self.runs.list_inside(frame):
            self.runs.measure_output(frame, output)
            self._origins.forget_layer()
            for tensor in tensors:
                if self._origins.comes_from_attention(tensor):  # keys may be used again
                    self._origins.begin(tensor, [self._origins.tag(tensor)])
        elif tensors and not self._origins.has(tensors[0]):  # by code that torch does not show
            self._origins.see_module(frame.module, (frame.args, frame.kwargs), tensors[0])

    def _see_call(self, function, args, kwargs, result):
        """Measures a call that is an attention; notes the origin of any other result.

        Args:
            function: The function of torch.
            args, kwargs: Its arguments.
            result: Its result.
        """
        if function is functional.scaled_dot_product_attention:
            self._measure_product(self._see_dot, args, kwargs, result)
            return
        product = read_product(function, args, kwargs) if function in MAPS else None
        if product is not None:
            factors = [p for p in (product, product.swap()) if is_weights(self._origins, p)]
            if factors and not any(map(self._origins.is_constant, product[:2])):
                self._measure_product(self._see_weighted, factors, result)
                return
            for order in (product, product.swap()):
                linear = read_linear_attention(self._origins, order)
                if linear is not None:
                    self._measure_product(self._see_linear, *linear, result)
                    return
        self._origins.see_function(function, product, args, kwargs, result)

    def _measure_product(self, see, *args):
        """Measures a product that is not empty; its result comes from no map, whatever happens.

        Args:
            see: The method that measures it.
            *args: Arguments of see, last the result of the product.
        """
        result = args[-1]
        if result.numel():
            self._notes.attempt(self._frames[-1].name, "weights", see, *args)
        if not self._origins.has(result):
            self._origins.begin(result)

    def _see_dot(self, args, kwargs, result):
        """Measures a call of `scaled_dot_product_attention`, row by row for nested tensors.

        Args:
            args, kwargs: Arguments of the call.
            result: Its result.
        """
        names = ("query", "key", "value")[len(args) :]
        q, k, v = *args[:3], *(kwargs[name] for name in names)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        options = read_choice(self._origins, mask) if mask is not None else {}
        options |= dict(zip(_DOT_OPTIONS, args[3:], strict=False))
        options |= {name: a for name, a in kwargs.items() if name not in ("query", "key", "value")}
        if q.is_nested:
            rows = zip(*(split_nested(self._origins, a) for a in (q, k, v)), strict=True)
            for row in rows:  # (tensor, tag) of the queries, keys and values of one example
                tensors, tags = zip(*row, strict=True)
                self._add_dot(tensors, tags, options, result)
        else:
            self._add_dot((q, k, v), [self._origins.tag(a) for a in (q, k, v)], options, result)

    def _add_dot(self, tensors, tags, options, result):
        """Measures a call of `scaled_dot_product_attention`, whose products and weights torch does
        not show: describes the product of queries and keys by a letter for each axis, and computes
        its weights.

        Args:
            tensors: Queries [..., h, n, k], keys [..., h or fewer, m, k] and values.
            tags: Records of their origin, in the same order.
            options: Other arguments of `compute_dot_weights`.
            result: Result of the call.
        """
        q, k, _ = tensors
        axes = string.ascii_lowercase[: q.ndim - 2]
        sizes = dict(zip(axes + "xy", (*q.shape[:-1], k.shape[-2]), strict=True))
        shares_keys = axes and k.shape[-3] != q.shape[-3]  # heads in groups
        key_axes = (axes[:-1] + "g" if shares_keys else axes) + "yz"
        term = Term((axes + "xz", key_axes, axes + "xy"), sizes, *tags[:2])
        weights = products.compute_dot_weights(*tensors, **options)
        self.runs.add_product(self._frames, self._origins, term, weights, "", tags[2], result)

    def _see_linear(self, term, value, result):
        """Measures the tokens of linear attention.

        Linear attention never computes weights. The measurement gets an empty stand-in for them,
        which only says that every query may attend to every key.

        Args:
            term: Term of its queries and keys.
            value: Tag of the values.
            result: Product of queries and Σ_j k_j v_jᵀ.
        """
        n, m = (term.sizes[c] for c in term.letters[2][-2:])
        weights = products.allow_all(n, m, result.device)
        reason = "linear attention has none"
        self.runs.add_product(self._frames, self._origins, term, weights, reason, value, result)

    def _see_weighted(self, factors, result):
        """Measures a product of attention weights and values, if the weights come from queries and
        keys.

        Args:
            factors: The product with weights as first factor; twice, in both orders, where both may
                be weights.
            result: Result of the product.

        Raises:
            LeftOut: The weights do not come from one product of queries and keys, or are no
                distribution and the pairs of query and key are unknown.
        """
        factors = [p for p in factors if self._origins.tag(p.first).is_softmax] or factors
        product = factors[0]
        tag, value = (self._origins.tag(factor) for factor in product[:2])
        if not tag.terms:
            begin_mean(self._origins, product, result)
            raise LeftOut("its softmax is not taken over products of queries and keys")
        if len(factors) > 1:
            raise LeftOut("several products of queries and keys are multiplied")
        weights = read_weights(self._origins, product)
        refusal = ""
        is_normed = tag.is_softmax or tag.is_exponential or products.sums_to_one(weights.p)
        if not tag.is_softmax and not (is_normed and products.is_distribution(weights.p)):
            refusal = "its weights are not a distribution over keys"
            if "pairs" not in tag.followers:
                raise LeftOut(refusal)
        terms = read_terms(self._origins, product)
        term = choose_term(terms)
        parts = [other for other in terms if other.query.maps == term.query.maps]
        self.runs.add_product(
            self._frames, self._origins, term, weights, refusal, value, result, parts
        )


def _is_traced():
    """Returns whether torch compiles, traces, or is inside of `torch.func`."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()


def read_loss(output: Any) -> Tensor | None:
    """Reads the loss that a model returns: "loss" of it, the tensor itself, or its one number.

    Returns:
        The loss, a tensor of shape []; None if there is none or more than one.
    """
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    numbers = [a for a in tensors_in(output) if a.ndim == 0 and a.is_floating_point()]
    if isinstance(named, Tensor):
        numbers = [named] if named.numel() == 1 else []
    return numbers[0].detach().reshape(()) if len(numbers) == 1 else None
