"""Edits: the caller's functions, which change values of the layers at named edit points.

An edit is {name: function(value, layer) -> value}; names are checked. Layers are scanned, so
`layer` is a traced number: a function chooses with `jnp.where(layer == 3, changed, value)`. Edits
are traced again at every call of a pass, and arrays that they refer to are arguments of the
compiled program, so other values of them do not compile again. In a sum of paths, where everything
is frozen, an edit becomes its linear part at the value; its constant part joins the offset.

Axis letters: n queries, m keys, h heads, k and v their widths, d width, f MLP width, g channels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float

from rank_collapse import checks, struct
from rank_collapse.annotations import AnyArray, DType, Leaf, Number, Tree


@dataclasses.dataclass(frozen=True)
class EditPoints:
    """The edit points of one layer during its computation: values are edited and saved there."""

    edits: Mapping[str, Callable] | None = None
    layer: Number = 0
    save: tuple[str, ...] = ()  # names of the points whose values are saved
    prefix: str = ""  # before the names, such as "cross_"
    # Values so far by name: of edited points before the edit, and of saved points after it.
    unedited: dict[str, Array] = dataclasses.field(default_factory=dict)
    saved: dict[str, Array] = dataclasses.field(default_factory=dict)

    def has_edit(self, name: str) -> bool:
        """Return whether there is an edit of the point."""
        return self.edits is not None and self.prefix + name in self.edits

    def is_used(self, name: str) -> bool:
        """Return whether the value of the point is edited or saved, and so must be computed
        separately."""
        return self.has_edit(name) or self.prefix + name in self.save

    def __call__(self, name: str, value: AnyArray) -> AnyArray:
        """Return the value after the edit of this point, and save it if `save` lists the point.

        Args:
            name: Name of the point, without the prefix.
            value: Value that the layer computed.
        """
        full_name = self.prefix + name
        if self.has_edit(name):
            self.unedited[full_name] = value
            value = self.edits[full_name](value, self.layer)
        if full_name in self.save:
            self.saved[full_name] = value
        return value


def edit_point_shapes(config: Any, n: int = 1, m: int = 1) -> dict[str, tuple[int, ...]]:
    """List the edit points of a network by name, with the shapes of the values there.

    In attention: the queries and keys as they enter their product, the values, the scores before
    the mask, the weights, and the output of each head; with the prefix "cross_" in the attention to
    a memory. In the MLP: the hidden units after their nonlinearity. In each branch: its input after
    its norm, and its output. In the stream: the state after each attention, and after the layer,
    "residual".

    Args:
        config: The network.
        n, m: Tokens, of the memory too.
    """
    h, d, shapes = config.num_heads, config.d_model, {}
    for kind, prefix, keys in (("attention", "", n), ("cross", "cross_", m)):
        if kind in config.kinds:
            shapes |= {
                f"{prefix}q": (h, n, config.qk_width),
                f"{prefix}k": (h, keys, config.qk_width),
                f"{prefix}v": (h, keys, config.v_width),
                f"{prefix}scores": (h, n, keys),
                f"{prefix}weights": (h, n, keys),
                f"{prefix}head_output": (h, n, d),
                f"{kind}_input": (n, d),
                f"{kind}_branch": (n, d),
                f"after_{kind}": (n, d),
            }
    if "mlp" in config.kinds:
        shapes |= {"mlp_input": (n, d), "mlp_hidden": (n, config.ff_width), "mlp_branch": (n, d)}
    if config.mix is not None:
        del shapes["scores"]
    return shapes | {"residual": (n, d)}


def check_names(names: Sequence[str], config: Any) -> None:
    """Check that a network has edit points of these names.

    Args:
        names: Names of edit points.
        config: The network.

    Raises:
        ValueError: The network does not have one of them.
    """
    edit_points = edit_point_shapes(config)
    for name in names:
        checks.check_choice(f"edit point {name!r}", name, edit_points, " of this network")


class _Code:
    """The program of an edit; programs with the same text are equal, so that each is compiled
    once."""

    def __init__(self, jaxpr: object):
        self.jaxpr, self.text = jaxpr, str(jaxpr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


class Edit(struct.Struct):
    """An edit of one point: its program, and the arrays that it refers to."""

    arrays: Tree
    code: Any = struct.field(pytree_node=False)

    def __call__(self, value: Leaf, layer: Number) -> Leaf:
        dtype = self.code.jaxpr.invars[0].aval.dtype
        run_program = jaxpr_as_fun(ClosedJaxpr(self.code.jaxpr, self.arrays))
        edited = run_program(value.astype(dtype), jnp.asarray(layer, jnp.int32))[0]
        return edited.astype(value.dtype)


def trace_edits(
    edit: Any, config: Any, num_tokens: int, num_keys: int, dtype: DType
) -> dict[str, Edit] | None:
    """Trace the caller's edits.

    Args:
        edit: {name: function(value, layer) -> value}; None for none.
        config: The network.
        num_tokens, num_keys: n, and m of the memory.
        dtype: Number format of the values.

    Returns:
        {name: `Edit`}, or None.

    Raises:
        ValueError: It is not such a dictionary, a name is unknown, or a function reads the value of
            a traced array or does not return an array of the same shape.
    """
    if edit is None:
        return None
    if not isinstance(edit, Mapping):
        raise ValueError(
            f"edit={edit!r} is not a dictionary {{name: function(value, layer) -> value}}"
        )
    check_names(list(edit), config)
    shapes = edit_point_shapes(config, num_tokens, num_keys)
    return {name: _trace_edit(name, fn, shapes[name], dtype) for name, fn in edit.items()}


_READS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _trace_edit(name, fn, shape, dtype):
    """Trace one edit.

    Args:
        name: Name of the edit point.
        fn: function(value, layer) -> value.
        shape, dtype: Shape and number format of the value.

    Raises:
        ValueError: In the same cases as `trace_edits`.
    """
    if not callable(fn):
        raise ValueError(f"edit of {name!r}, {fn!r}, is not a function(value, layer) -> value")
    arguments = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), jnp.int32))
    try:
        # A new function: what is traced once for `fn` may refer to other values by now.
        closed, result = jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*arguments)
    except _READS_VALUES as error:
        raise ValueError(
            f"edit of {name!r} reads the value of a traced array, perhaps `if layer == 3` or a "
            "function of numpy: use jnp.where(layer == 3, changed, value), and jnp"
        ) from error
    result_shape = getattr(result, "shape", type(result).__name__)
    if result_shape != shape or jnp.issubdtype(result.dtype, jnp.complexfloating):
        raise ValueError(
            f"edit of {name!r} returned {result_shape} for a value of shape {shape}: it must "
            "return an array of that shape, of real numbers"
        )
    return Edit([jnp.asarray(a) for a in closed.consts], _Code(closed.jaxpr))


def carry_channels(
    edit: Callable[[Array], Array],
    value: Float[Array, "*s"],
    c: Float[Array, "g *s"],
    ones: Float[Array, "#g"],
) -> Float[Array, "g *s"]:
    """Compute J c + ones·(edit(v) − J v) for channels c that sum to v, J the derivative at v.

    The channels then sum to edit(v), whatever the edit is: an ablation empties them, a constant
    that replaces v joins the offset, and a factor multiplies all of them.

    Args:
        edit: Function that edits a value.
        value: The edited array, v.
        c: Channels.
        ones: [g] or [1], each channel's share of constants.
    """
    edited, push = jax.linearize(edit, value)
    constant = edited - push(value)
    return jax.vmap(push)(c) + ones.reshape((-1,) + (1,) * value.ndim) * constant[None]
