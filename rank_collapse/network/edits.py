"""Edits: a function of the caller's own that changes what the layers compute, at named places.

An edit is `edit(layer, name, value) -> value`. Layers are scanned, so that `layer` is a traced
number: an edit is a pure function that chooses with `jnp.where(layer == 3, changed, value)` and
returns `value` for all names that it leaves alone. In a sum of paths, where everything is frozen,
an edit is its linear part at the value; what is left of it joins the offset.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import Partial
from jaxtyping import Array, Float

# Names as in LayerTrace. Frozen passes take the scores and weights from the forward pass; the
# others are sums that travel through their layers.
WEIGHT_NAMES = ("attention_scores", "attention", "cross_scores", "cross_attention")
STATE_NAMES = (
    "attention_branch",
    "after_attention",
    "cross_branch",
    "after_cross",
    "mlp_branch",
    "hidden",
)


def as_edit(edit: Any) -> Partial | None:
    """An edit as a pytree: a function is static, a `jax.tree_util.Partial`'s arrays are traced.

    Raises:
        ValueError: Not a function.
    """
    if edit is None or isinstance(edit, Partial):
        return edit
    if not callable(edit):
        raise ValueError(f"edit={edit!r} is not a function edit(layer, name, value)")
    return Partial(edit)


def edited(edit: Partial | None, layer: Any, name: str, value: Any) -> Any:
    """The value that takes the place of `value`.

    Raises:
        ValueError: An edit that changes the shape or gives nothing back.
    """
    if edit is None:
        return value
    found = edit(layer, name, value)
    if getattr(found, "shape", None) != value.shape:
        shape = getattr(found, "shape", None)
        raise ValueError(
            f"edit gave {type(found).__name__ if shape is None else shape} for {name!r} of shape "
            f"{value.shape}: return `value` for what stays as it is"
        )
    return found.astype(value.dtype)


def carried(
    edit: Callable[[Any], Any],
    value: Float[Array, "n d"],
    c: Float[Array, "g n d"],
    ones: Float[Array, "#g"],
) -> Float[Array, "g n d"]:
    """J c + ones·(edit(v) − J v) for channels c that sum to v, J the derivative of edit at v.

    The channels then sum to edit(v), whatever the edit: an ablation empties them, a constant put
    in the place of v belongs to the offset, a factor multiplies all of them.
    """
    found, push = jax.linearize(edit, value)
    rest = found - push(value)
    return jax.vmap(push)(c) + ones[:, None, None] * rest[None]
