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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.flax_adapters import named_arrays
from rank_collapse.measures.monitor import monitor

NAME = "rank_collapse"  # of what is sown
WEIGHTS = "attention_weights"  # as Flax names them
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
Measure = Callable[..., dict[str, Any]]
Scalars = dict[str, Float[Array, "l"]]


def is_attention(module: Any) -> bool:
    """Whether the name of a module's class has "attention" or "attn" in it."""
    return bool(_ATTENTION.search(type(module).__name__))


def linen_monitored(
    module: Any,
    variables: Any,
    *inputs: Any,
    select: Callable[[Any], bool] = is_attention,
    measure: Measure = monitor,
    mutable: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, Scalars]:
    """(what `module.apply` gives, scalars) of a Linen model.

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

    def interceptor(call, args, kwargs, context):
        own = context.module
        if context.method_name != "__call__" or not select(own):
            return call(*args, **kwargs)
        weighs = isinstance(own, nn.MultiHeadDotProductAttention)
        with record.module(args, kwargs) as inside:
            out = call(*args, **kwargs | {"sow_weights": True} if weighs else kwargs)
            if weighs and own.has_variable("intermediates", WEIGHTS):
                kept = own.get_variable("intermediates", WEIGHTS)
                inside.weights = kept[-1] if kept else None
                own.put_variable("intermediates", WEIGHTS, ())
        if inside.scalars is not None:
            own.sow("intermediates", NAME, inside.scalars)
        return out

    with nn.intercept_methods(interceptor):
        out, state = module.apply(
            variables, *inputs, mutable=[*mutable, "intermediates"], **options
        )
    scalars = _by_layer(state.pop("intermediates", {}))
    return ((out, state) if mutable else out), scalars


def nnx_monitored(
    model: Any,
    *inputs: Any,
    select: Callable[[Any], bool] = is_attention,
    measure: Measure = monitor,
    **options: Any,
) -> tuple[Any, Scalars]:
    """(model(*inputs, **options), scalars) of an NNX model; see `linen_monitored`."""
    from flax import nnx

    record = _Record(measure)

    def intercepted(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            attend = getattr(self, "attention_fn", None)
            with record.module(args, kwargs) as inside:
                if isinstance(self, nnx.MultiHeadAttention):
                    self.attention_fn = functools.partial(_attended, inside, attend)
                try:
                    out = method(self, *args, **kwargs)
                finally:
                    if attend is not None:
                        self.attention_fn = attend
            if inside.scalars is not None:
                self.sow(nnx.Intermediate, NAME, inside.scalars)
            return out

        return call

    classes = {type(own) for _, own in nnx.iter_modules(model) if select(own)}
    before = {own: own.__dict__.get("__call__") for own in classes}
    for own in classes:
        own.__call__ = intercepted(own.__call__)
    try:
        out, state = nnx.capture(model, nnx.Intermediate)(*inputs, **options)
    finally:
        for own, method in before.items():
            if method is None:
                del own.__call__
            else:
                own.__call__ = method
    return out, _by_layer(nnx.to_pure_dict(state))


def _attended(inside, attend, query, key, value, **options):
    """`attend`, whose weights are kept for the measure; nothing holds them afterwards."""
    from flax.nnx.nn.attention import dot_product_attention_weights

    own = {name: options[name] for name in ("mask", "is_causal") if name in options}
    inside.weights = dot_product_attention_weights(query, key, deterministic=True, **own)
    return attend(query, key, value, **options)


def equinox_monitored(
    model: Any,
    *inputs: Any,
    blocks: Callable[[Any], Sequence[Any]],
    measure: Measure = monitor,
    **options: Any,
) -> tuple[Any, Scalars]:
    """(model(*inputs, **options), scalars) of an Equinox model whose blocks are called one by one.

    Args:
        model, *inputs, **options: What is called.
        blocks: blocks(model), the layers, of which the tokens that each is called with are
            measured: whole blocks, or the attention of each.
        measure: As in `linen_monitored`, without weights.

    Raises:
        ValueError: None of them was called with tokens.
    """
    import equinox as eqx

    record, found = _Record(measure), []

    def wrapped(block):
        def call(*args, **kwargs):
            with record.module(args, kwargs) as inside:
                out = block(*args, **kwargs)
            found.append({NAME: (inside.scalars,)})
            return out

        return call

    model = eqx.tree_at(blocks, model, [wrapped(block) for block in blocks(model)])
    out = model(*inputs, **options)
    return out, _by_layer({str(i): scalars for i, scalars in enumerate(found)})


class _Record:
    """Modules that are being called, and what each of them reads."""

    def __init__(self, measure):
        self._measure, self._calls = measure, 0
        self.weights = self.scalars = None

    @contextlib.contextmanager
    def module(self, args, kwargs) -> Iterator["_Record"]:
        """One call: its scalars, None where a module inside was measured or nothing is tokens."""
        x = next((a for a in (*args, *kwargs.values()) if _are_tokens(a)), None)
        inside, before = _Record(self._measure), self._calls
        yield inside
        if x is None or self._calls > before:
            return
        self._calls += 1
        x, weights = jax.lax.stop_gradient((x, inside.weights))
        inside.scalars = self._measure(x, weights)


def _are_tokens(a):
    known = isinstance(a, jax.Array) and a.ndim in (2, 3) and a.shape[-2] > 1
    return known and jnp.issubdtype(a.dtype, jnp.floating)


def _by_layer(tree):
    """{measure: [l]} of what was sown."""
    found: dict[str, list[Any]] = {}
    for name, value in named_arrays(tree).items():
        _, sown, place = name.partition(f"{NAME}#")
        if sown:
            found.setdefault(place.rpartition(".")[2], []).append(jnp.atleast_1d(value))
    if not found:
        raise ValueError(
            "no attention was measured: select= or blocks= may name the modules, and nn.scan has "
            'to have variable_axes={..., "intermediates": 0}'
        )
    return {measure: jnp.concatenate(values) for measure, values in found.items()}
