"""One call to measure a JAX model while it trains: Flax Linen, Flax NNX and Equinox.

    out, scalars = jax_watch.linen_monitored(model, variables, x)    # model.apply(variables, x)
    out, scalars = jax_watch.nnx_monitored(model, x)                 # model(x)
    out, scalars = jax_watch.equinox_monitored(model, x, blocks=lambda m: m.layers)

The scalars are those of `rc.monitor`, by layer [l] in the order of the calls: for the tokens that
each attention reads and, in Flax's own multi-head attention, for its weights before dropout. The
functions are pure and carry no gradients. They work inside jit, grad and vmap, where the scalars
are outputs like any other. The model may itself use vmap, scan, checkpoint and jit of JAX or of its
framework: an axis of a vmap counts as a batch, and the steps of a scan are layers, see
`watch.taps`. No weights and no states are kept.
"""

import contextlib
import functools
import inspect
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.checks import refuse_if
from rank_collapse.measures.monitor import monitor
from rank_collapse.watch.taps import measure_taps, tap

Measure = Callable[..., dict[str, Any]]
Scalars = dict[str, Float[Array, "l"]]

_class_lock = threading.RLock()  # held while methods of classes, which threads share, are wrapped


def is_attention(module: object) -> bool:
    """Return whether the name of a module's class has "attention" or "attn" in it."""
    return bool(re.search("attention|attn", type(module).__name__, re.IGNORECASE))


def linen_monitored(
    module: object,
    variables: object,
    *inputs: object,
    select: Callable[[Any], bool] = is_attention,
    measure: Measure = monitor,
    mutable: Any = False,
    **options: object,
) -> tuple[Any, Scalars]:
    """Apply a Linen model and measure its attentions.

    Args:
        module, variables, *inputs, mutable, **options: See `module.apply`.
        select: Function that chooses the modules to measure; of nested ones the inner module is
            measured.
        measure: measure(x, weights) of tokens [..., n, d] and weights [..., h, n, m] or None, such
            as functools.partial(rc.monitor, mask=mask, tokens="unit"). Axes of a vmap inside the
            model stand in front.

    Returns:
        The result of `module.apply`, and scalars [l] by name, NaN where a layer has none.

    Raises:
        ValueError: No module was measured, or one is inside a transformation that returns no
            further outputs, see `watch.taps.measure_taps`.
    """
    from flax import linen as nn
    from flax.linen import attention

    def intercept_call(call, args, kwargs, context):
        """Records the call of a selected module, and keeps the weights of Flax's own attention."""
        module = context.module
        if context.method_name != "__call__" or not select(module):
            return call(*args, **kwargs)
        with _mark_call(type(module).__call__, args, kwargs) as inside:
            if not isinstance(module, nn.MultiHeadDotProductAttention):
                return call(*args, **kwargs)
            # Linen's modules are frozen, but for the call alone
            attend = module.attention_fn
            wrapped = inside.keep_weights(attend, attention)
            object.__setattr__(module, "attention_fn", wrapped)
            try:
                return call(*args, **kwargs)
            finally:
                object.__setattr__(module, "attention_fn", attend)

    def apply():
        with nn.intercept_methods(intercept_call):
            return module.apply(variables, *inputs, mutable=mutable, **options)

    return _measure_model(apply, measure, select)


def nnx_monitored(
    model: object,
    *inputs: object,
    select: Callable[[Any], bool] = is_attention,
    measure: Measure = monitor,
    **options: object,
) -> tuple[Any, Scalars]:
    """Call an NNX model and measure its attentions.

    Transformations of NNX take arguments by position only, so bind the others:
    nnx.vmap(functools.partial(nnx_monitored, measure=measure), in_axes=(0, None)).

    Args:
        model, *inputs, **options: The model and its arguments. Variables that the call changes are
            changed.
        select, measure: See `linen_monitored`.

    Returns:
        (model(*inputs, **options), scalars), see `linen_monitored`.

    Raises:
        ValueError: In the same cases as `linen_monitored`.
    """
    from flax import nnx
    from flax.nnx.nn import attention

    def wrap_method(method):
        """Wraps a module's method so that its calls are recorded, with the weights of attention."""

        @functools.wraps(method)
        def call_method(self, *args, **kwargs):
            """Calls the module's method, and records the call and its attention weights."""
            if not select(self):
                return method(self, *args, **kwargs)
            marked = _mark_call(method, args, kwargs)
            with marked as inside, contextlib.ExitStack() as patches:
                if isinstance(self, nnx.MultiHeadAttention):
                    attend = inside.keep_weights(self.attention_fn, attention)
                    patches.enter_context(mock.patch.object(self, "attention_fn", attend))
                return method(self, *args, **kwargs)

        return call_method

    def list_variables(node):
        return list(nnx.to_flat_state(nnx.state(node, nnx.Variable)))

    called = (model, inputs, options)
    graph, *states = nnx.split(called, nnx.Variable, ...)

    def call():  # on copies, whose variables belong to the trace
        """Calls a copy of the model, whose variables belong to the trace, with wrapped methods."""
        model, inputs, options = copies = nnx.merge(graph, *states, copy=True)
        old = {path: a.get_raw_value() for path, a in list_variables(copies)}
        with _class_lock, contextlib.ExitStack() as patches:
            for kind in {type(module) for _, module in nnx.iter_modules(model) if select(module)}:
                method = wrap_method(kind.__call__)
                patches.enter_context(mock.patch.object(kind, "__call__", method))
            out = model(*inputs, **options)
        new = list_variables(copies)
        changed = [(path, a) for path, a in new if a.get_raw_value() is not old.get(path)]
        return out, nnx.from_flat_state(changed)

    (out, state), scalars = _measure_model(call, measure, select)
    nnx.update(called, state)
    return out, scalars


def equinox_monitored(
    model: object,
    *inputs: object,
    blocks: Callable[[Any], Any],
    measure: Measure = monitor,
    call: Callable[..., Any] | None = None,
    **options: object,
) -> tuple[Any, Scalars]:
    """Call an Equinox model and measure the input tokens of its blocks.

    Args:
        model, *inputs, **options: The model and its arguments.
        blocks: blocks(model): the list of layers, whole blocks or the attention of each; or one
            module whose arrays are stacked, for a scan.
        measure: See `linen_monitored`, without weights.
        call: call(model, *inputs, **options) in place of the model, such as
            lambda model, x: jax.vmap(model)(x), whose examples are measured as one batch.

    Returns:
        (the output, scalars), see `linen_monitored`.

    Raises:
        ValueError: None of the blocks was called with tokens; see also `linen_monitored`.
    """
    import equinox as eqx

    chosen = blocks(model)
    is_list = isinstance(chosen, list | tuple)
    refuse_if(
        not chosen if is_list else not isinstance(chosen, eqx.Module),
        f"blocks= gives {chosen!r:.60}, not a list of layers or a module of stacked ones",
    )
    tapped = [_tap_block(block) for block in chosen] if is_list else _tap_block(chosen)
    model = eqx.tree_at(blocks, model, tapped)
    call = (lambda model, *inputs, **options: model(*inputs, **options)) if call is None else call
    return _measure_model(lambda: call(model, *inputs, **options), measure)


def _tap_block(block):
    """Return a block that marks its input tokens to be measured (`tap`) when it is called; its
    fields do not change.

    A block of Equinox is copied as an object of a derived class, so that it is the same pytree.
    """
    import equinox as eqx

    if not isinstance(block, eqx.Module):

        @functools.wraps(block)
        def call_block(*args, **kwargs):
            """Calls the block, and marks its tokens."""
            with _mark_call(block, args, kwargs):
                return block(*args, **kwargs)

        return call_block
    tapped = object.__new__(_tap_class(type(block)))
    tapped.__dict__.update(block.__dict__)
    return tapped


@functools.cache  # one class for each, or a function that was compiled would be compiled again
def _tap_class(kind):
    """Derive a class of blocks whose call marks its input tokens to be measured."""

    def call_block(self, *args, **kwargs):
        """Calls the block, and marks its tokens."""
        with _mark_call(kind.__call__, args, kwargs):
            return kind.__call__(self, *args, **kwargs)

    names = {"__call__": call_block, "__module__": kind.__module__}
    names["__qualname__"] = kind.__qualname__
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(names))


@contextlib.contextmanager
def _mark_call(method, args, kwargs) -> Iterator["_Record"]:
    """Mark a module's call: its tokens, the first argument of floats [..., n, d], are to be
    measured, unless a nested call is measured or the module reads no tokens.

    Args:
        method: The function that is called.
        args, kwargs: Arguments of the call; the latter count in the order of the function.

    Yields:
        Where the attention of the module may keep its weights.
    """
    names = [*inspect.signature(method).parameters] if len(kwargs) > 1 else []
    by_name = sorted(kwargs, key=lambda name: names.index(name) if name in names else len(names))
    values = (*args, *(kwargs[name] for name in by_name))
    x = next((a for a in values if _are_tokens(a)), None)
    inside = _Record()
    if x is not None:
        tap(x, part="begin")
    yield inside
    if x is not None:
        is_usable = inside.trace == _current_trace()
        tap(x, inside.weights if is_usable else None, part="end")


class _Record:
    """The attention weights of a module that is being called.

    Attributes:
        weights: The weights; None for none.
        trace: The trace of JAX to which they belong: that of an inner jit, for example.
    """

    def __init__(self):
        self.weights = self.trace = None

    def keep_weights(self, attend, library):
        """Wrap Flax's `dot_product_attention` to keep its weights; the weights of other functions
        are unknown.

        Args:
            attend: The attention function of a module.
            library: The Flax module that defines it.
        """
        if getattr(attend, "__wrapped__", attend) is not library.dot_product_attention:
            return attend

        @functools.wraps(library.dot_product_attention)
        def keep_and_attend(query, key, value, **options):
            """Keeps the weights without dropout, then computes the attention as the model does."""
            weigh = library.dot_product_attention_weights
            names = inspect.signature(weigh).parameters.keys() - {"module", "deterministic"}
            weight_options = {name: a for name, a in options.items() if name in names}
            self.weights = weigh(query, key, deterministic=True, **weight_options)
            self.trace = _current_trace()
            return attend(query, key, value, **options)

        return keep_and_attend


def _current_trace():
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


def _are_tokens(a):
    """Return whether an argument is an array of floats [..., n, d] with at least two tokens."""
    is_matrix = isinstance(a, jax.Array) and a.ndim > 1 and a.shape[-2] > 1
    return is_matrix and jnp.issubdtype(a.dtype, jnp.floating)


def _measure_model(call, measure, choice=""):
    """Run a model, and measure the attentions in it.

    Args:
        call: Function without arguments that calls the model.
        measure: Function that measures an attention's input and weights.
        choice: Function that chooses the modules.

    Returns:
        (result of the call, the measurements).

    Raises:
        ValueError: No attention was measured.
    """
    out, scalars = measure_taps(call, measure, choice=choice)
    refuse_if(
        not scalars,
        "no attention was measured: select= or blocks= may name the modules, which have to be "
        "called with tokens [..., n, d]",
    )
    return out, scalars
