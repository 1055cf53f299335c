"""One call to measure a JAX model while it trains: Flax Linen, Flax NNX and Equinox.

    out, scalars = jax_watch.linen_monitored(model, variables, x)    # model.apply(variables, x)
    out, scalars = jax_watch.nnx_monitored(model, x)                 # model(x)
    out, scalars = jax_watch.equinox_monitored(model, x, blocks=lambda m: m.layers)

The scalars are those of `rc.monitor`, by layer [l]: of the tokens that each attention reads and, of
Flax's own multi-head attention, of its weights before dropout. Pure, without gradients: inside
jit, grad and vmap, where they are outputs as any other. In Flax also inside the model's own scan
and remat, since they are sown as "intermediates"; no weights and no states are kept.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.flax_adapters import named_arrays
from rank_collapse.measures.monitor import monitor

NAME = "rank_collapse"  # of what is sown
WEIGHTS = "attention_weights"  # as Flax names them
Measure = Callable[..., dict[str, Any]]
Scalars = dict[str, Float[Array, "l"]]


def is_attention(module: Any) -> bool:
    """Return whether the name of a module's class has "attention" or "attn" in it."""
    return bool(re.search("attention|attn", type(module).__name__, re.IGNORECASE))


def linen_monitored(
    module: Any,
    variables: Any,
    *inputs: Any,
    select: Callable[[Any], bool] = is_attention,
    measure: Measure = monitor,
    mutable: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, Scalars]:
    """Apply a Linen model and measure its attentions.

    Args:
        module, variables, *inputs, **options: As `module.apply` takes them. In `nn.scan` its
            variable_axes needs "intermediates": 0.
        select: Which modules are measured; of one inside another the inner one.
        measure: measure(x, weights) of tokens [..., n, d] and weights [..., h, n, m] or None, such
            as functools.partial(rc.monitor, mask=mask, tokens="unit").
        mutable: Further collections; with any the first output is (output, state), as of Flax.

    Returns:
        The output, and scalars [l] by name, modules in natural order of their paths.

    Raises:
        ValueError: No module was measured.
    """
    from flax import linen as nn

    record = _Record(measure)

    def intercept_call(call, args, kwargs, context):
        attention = context.module
        if context.method_name != "__call__" or not select(attention):
            return call(*args, **kwargs)
        has_weights = isinstance(attention, nn.MultiHeadDotProductAttention)
        with record.record_call(args, kwargs) as inside:
            out = call(*args, **kwargs | {"sow_weights": True} if has_weights else kwargs)
            if has_weights and attention.has_variable("intermediates", WEIGHTS):
                weights = attention.get_variable("intermediates", WEIGHTS)
                inside.weights = weights[-1] if weights else None
                attention.put_variable("intermediates", WEIGHTS, ())
        if inside.scalars is not None:
            attention.sow("intermediates", NAME, inside.scalars)
        return out

    with nn.intercept_methods(intercept_call):
        out, state = module.apply(
            variables, *inputs, mutable=[*mutable, "intermediates"], **options
        )
    scalars = _group_by_layer(state.pop("intermediates", {}))
    return ((out, state) if mutable else out), scalars


def nnx_monitored(
    model: Any,
    *inputs: Any,
    select: Callable[[Any], bool] = is_attention,
    measure: Measure = monitor,
    **options: Any,
) -> tuple[Any, Scalars]:
    """Call an NNX model and measure its attentions.

    Args:
        model, *inputs, **options: What is called.
        select, measure: As `linen_monitored` takes them.

    Returns:
        (model(*inputs, **options), scalars), see `linen_monitored`.

    Raises:
        ValueError: No module was measured.
    """
    from flax import nnx

    record = _Record(measure)

    def wrap_method(method):
        @functools.wraps(method)
        def call_method(self, *args, **kwargs):
            with record.record_call(args, kwargs) as inside, contextlib.ExitStack() as patches:
                if isinstance(self, nnx.MultiHeadAttention):
                    attend = functools.partial(_attend, inside, self.attention_fn)
                    patches.enter_context(mock.patch.object(self, "attention_fn", attend))
                out = method(self, *args, **kwargs)
            if inside.scalars is not None:
                self.sow(nnx.Intermediate, NAME, inside.scalars)
            return out

        return call_method

    with contextlib.ExitStack() as patches:
        for kind in {type(module) for _, module in nnx.iter_modules(model) if select(module)}:
            method = wrap_method(kind.__call__)
            patches.enter_context(mock.patch.object(kind, "__call__", method))
        out, state = nnx.capture(model, nnx.Intermediate)(*inputs, **options)
    return out, _group_by_layer(nnx.to_pure_dict(state))


def _attend(inside, attend, query, key, value, **options):
    """Call `attend`, and keep its weights for the measure; nothing holds them afterwards."""
    from flax.nnx.nn.attention import dot_product_attention_weights

    masks = {name: options[name] for name in ("mask", "is_causal") if name in options}
    inside.weights = dot_product_attention_weights(query, key, deterministic=True, **masks)
    return attend(query, key, value, **options)


def equinox_monitored(
    model: Any,
    *inputs: Any,
    blocks: Callable[[Any], Sequence[Any]],
    measure: Measure = monitor,
    **options: Any,
) -> tuple[Any, Scalars]:
    """Call an Equinox model whose blocks are called one by one, and measure these.

    Args:
        model, *inputs, **options: What is called.
        blocks: blocks(model), the list of layers, of which the tokens that each is called with are
            measured: whole blocks, or the attention of each.
        measure: As in `linen_monitored`, without weights.

    Returns:
        (model(*inputs, **options), scalars), see `linen_monitored`.

    Raises:
        ValueError: None of them was called with tokens, or they are stacked in one module.
    """
    import equinox as eqx

    record, layers = _Record(measure), []
    if not isinstance(blocks(model), list | tuple):
        raise ValueError(
            f"blocks= gives a {type(blocks(model)).__name__}, not a list: of layers that are "
            "stacked call rc.monitor in the body of the scan, and return what it gives"
        )

    def wrap_block(block):
        def call_block(*args, **kwargs):
            with record.record_call(args, kwargs) as inside:
                out = block(*args, **kwargs)
            layers.append({NAME: (inside.scalars,)})
            return out

        return call_block

    model = eqx.tree_at(blocks, model, [wrap_block(block) for block in blocks(model)])
    out = model(*inputs, **options)
    return out, _group_by_layer({str(i): scalars for i, scalars in enumerate(layers)})


class _Record:
    """Modules that are being called, and what each of them reads."""

    def __init__(self, measure):
        self._measure, self._calls = measure, 0
        self.weights = self.scalars = None

    @contextlib.contextmanager
    def record_call(self, args, kwargs) -> Iterator["_Record"]:
        """Record a call: its scalars, None if one inside was measured or it reads no tokens."""
        x = next((a for a in (*args, *kwargs.values()) if _are_tokens(a)), None)
        inside, before = _Record(self._measure), self._calls
        yield inside
        if x is None or self._calls > before:
            return
        self._calls += 1
        x, weights = jax.lax.stop_gradient((x, inside.weights))
        inside.scalars = self._measure(x, weights)


def _are_tokens(a):
    is_matrix = isinstance(a, jax.Array) and a.ndim in (2, 3) and a.shape[-2] > 1
    return is_matrix and jnp.issubdtype(a.dtype, jnp.floating)


def _group_by_layer(tree):
    """Group what was sown: {measure: [l]}."""
    columns: dict[str, list[Any]] = {}
    for name, value in named_arrays(tree).items():
        _, sown, place = name.partition(f"{NAME}#")
        if sown:
            columns.setdefault(place.rpartition(".")[2], []).append(jnp.atleast_1d(value))
    if not columns:
        raise ValueError(
            "no attention was measured: select= or blocks= may name the modules, and nn.scan has "
            'to have variable_axes={..., "intermediates": 0}'
        )
    return {measure: jnp.concatenate(values) for measure, values in columns.items()}
