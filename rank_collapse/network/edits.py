"""Edits: the caller's functions, which change values of the layers at named places.

An edit is {name: function(value, layer) -> value}; names are checked. Layers are scanned, so that
`layer` is a traced number: a function chooses with `jnp.where(layer == 3, changed, value)`. It is
traced again at every call of a pass, and arrays that it refers to are arguments of the compiled
program: a value that changed is a value that is used, and no program is compiled for it. In a sum
of paths, where everything is frozen, an edit is its linear part at the value; what is left of it
joins the offset.

Axis letters: n queries, m keys, h heads, k and v their widths, d width, f MLP width, g channels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, Float

from rank_collapse import struct


@dataclasses.dataclass(frozen=True)
class EditPoints:
    """The places of one layer as it is computed, where values are edited and kept."""

    edits: Mapping[str, Callable] | None = None
    layer: Any = 0
    keep: tuple[str, ...] = ()  # names of the places whose values are asked for
    prefix: str = ""  # before the names, such as "cross_"
    # Values so far by name: those of edited places before the edit, and those after it.
    unedited: dict[str, Any] = dataclasses.field(default_factory=dict)
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)

    def edits_at(self, name: str) -> bool:
        """Whether there is an edit of the place."""
        return self.edits is not None and self.prefix + name in self.edits

    def wants(self, name: str) -> bool:
        """Whether the value of the place is edited or kept, and so computed separately."""
        return self.edits_at(name) or self.prefix + name in self.keep

    def __call__(self, name: str, value: Any) -> Any:
        """The value after the edit of this place, which is kept where that is asked for."""
        edits, full = self.edits_at(name), self.prefix + name
        if edits:
            self.unedited[full] = value
            value = self.edits[full](value, self.layer)
        if full in self.keep:
            self.kept[full] = value
        return value


def edit_point_shapes(config: Any, n: int = 1, m: int = 1) -> dict[str, tuple[int, ...]]:
    """The names of a network's places, with the shape of what is there.

    In attention the queries and keys as their product takes them, the values, the scores before
    the mask, the weights, and what each head adds to the branch; "cross_" before those of the
    attention to a memory. The hidden units of the MLP after their nonlinearity. Each branch's
    input after its norm and its output, the stream after each attention, and the stream after
    the layer, "residual"; [s, n, d] where there are several streams.

    Args:
        n, m: Tokens, of the memory too.
    """
    h, d, found = config.num_heads, config.d_model, {}
    state = (*config.streams, n, d)
    for kind, prefix, keys in (("attention", "", n), ("cross", "cross_", m)):
        if kind in config.kinds:
            found |= {
                f"{prefix}q": (h, n, config.qk_width),
                f"{prefix}k": (h, keys, config.qk_width),
                f"{prefix}v": (h, keys, config.v_width),
                f"{prefix}scores": (h, n, keys),
                f"{prefix}weights": (h, n, keys),
                f"{prefix}head_output": (h, n, d),
                f"{kind}_input": (n, d),
                f"{kind}_branch": (n, d),
                f"after_{kind}": state,
            }
    if "mlp" in config.kinds:
        found |= {"mlp_input": (n, d), "mlp_hidden": (n, config.ff_width), "mlp_branch": (n, d)}
    if config.mix is not None:
        del found["scores"]
    return found | {"residual": state}


def check_names(names: Sequence[str], config: Any) -> None:
    """Refuses names of places that a network does not have.

    Raises:
        ValueError: One.
    """
    known = edit_point_shapes(config)
    for name in names:
        struct.refuse_if(
            name not in known, f"{name!r} is not one of the places {tuple(known)} of this network"
        )


class _Code:
    """The program of an edit; equal where the text is, so that it is compiled once."""

    def __init__(self, jaxpr: Any):
        self.jaxpr, self.text = jaxpr, str(jaxpr)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Code) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Edit(struct.Struct):
    """An edit of one place: its program, and the arrays that it refers to."""

    arrays: Any
    code: Any = struct.field(pytree_node=False)

    def __call__(self, value: Array, layer: Any) -> Array:
        dtype = self._inputs[0].aval.dtype
        run = jaxpr_as_fun(ClosedJaxpr(self.code.jaxpr, self.arrays))
        return run(value.astype(dtype), jnp.asarray(layer, jnp.int32))[0].astype(value.dtype)

    @property
    def is_affine(self) -> bool:
        """Whether its derivative does not depend on the value, as its program shows."""
        value, layer = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._inputs)

        def derivative(v, t, layer):
            return jax.jvp(lambda v: self(v, layer), (v,), (t,))[1]

        jaxpr = jax.make_jaxpr(derivative)(value, value, layer).jaxpr
        return not any(_depends(jaxpr, [True, False, False]))

    @property
    def _inputs(self):
        return self.code.jaxpr.invars


def _depends(jaxpr, given):
    """Which outputs of a program depend on those of its inputs that are marked."""
    marked = {v for v, is_marked in zip(jaxpr.invars, given, strict=True) if is_marked}
    for eqn in jaxpr.eqns:
        flags = [not isinstance(v, Literal) and v in marked for v in eqn.invars]
        inner = eqn.params.get("jaxpr")
        if isinstance(inner, ClosedJaxpr) and len(inner.jaxpr.invars) == len(flags):
            flags = _depends(inner.jaxpr, flags)
        else:
            flags = [any(flags)] * len(eqn.outvars)
        marked |= {v for v, flag in zip(eqn.outvars, flags, strict=True) if flag}
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.outvars]


def trace_edits(
    edit: Any, config: Any, num_tokens: int, num_keys: int, dtype: Any
) -> dict[str, Edit] | None:
    """The caller's edits, traced.

    Args:
        edit: {name: function(value, layer) -> value}; None for none.
        num_tokens, num_keys: Tokens, and those of the memory.
        dtype: Of the values.

    Raises:
        ValueError: Not such a dictionary, an unknown name, or a function that asks for values of
            what is traced or does not give an array of the same shape back.
    """
    if edit is None:
        return None
    if not isinstance(edit, Mapping):
        raise ValueError(
            f"edit={edit!r} is not a dictionary {{name: function(value, layer) -> value}}"
        )
    check_names(list(edit), config)
    shapes = edit_point_shapes(config, num_tokens, num_keys)
    return {name: _traced(name, fn, shapes[name], dtype) for name, fn in edit.items()}


def _traced(name, fn, shape, dtype):
    if not callable(fn):
        raise ValueError(f"edit of {name!r}, {fn!r}, is not a function(value, layer) -> value")
    arguments = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), jnp.int32))
    try:
        # A function of its own: what is traced once for `fn` may refer to other values by now.
        closed, found = jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*arguments)
    except jax.errors.ConcretizationTypeError as error:
        raise ValueError(
            f"edit of {name!r} reads the value of a traced array, perhaps `if layer == 3`: "
            "use jnp.where(layer == 3, changed, value)"
        ) from error
    if getattr(found, "shape", None) != shape:
        given = getattr(found, "shape", type(found).__name__)
        raise ValueError(
            f"edit of {name!r} gave {given} for a value of shape {shape}: it must return "
            "an array of that shape"
        )
    return Edit([jnp.asarray(a) for a in closed.consts], _Code(closed.jaxpr))


def carry_channels(
    edit: Callable[[Any], Any],
    value: Float[Array, "*s"],
    c: Float[Array, "g *s"],
    ones: Float[Array, "#g"],
) -> Float[Array, "g *s"]:
    """J c + ones·(edit(v) − J v) for channels c that sum to v, J the derivative of edit at v.

    The channels then sum to edit(v), whatever the edit: an ablation empties them, a constant put
    in the place of v belongs to the offset, a factor multiplies all of them.
    """
    found, push = jax.linearize(edit, value)
    rest = found - push(value)
    return jax.vmap(push)(c) + ones.reshape(-1, *[1] * value.ndim) * rest[None]
