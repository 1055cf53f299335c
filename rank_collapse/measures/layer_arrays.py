"""Hidden states or attention of all layers, as one array with the layers first."""

from collections.abc import Mapping
from typing import Any

from rank_collapse.annotations import AnyArray
from rank_collapse.checks import refuse, refuse_if
from rank_collapse.measures.arrays import (
    as_floats,
    is_jax_array,
    match_framework,
    namespace,
)

KINDS = {"tokens": ("hidden states", "nd"), "attention": ("attention weights", "hnm")}


def has_head_axis(hidden: object, batch_axis: int | None) -> bool:
    """Return whether an array has one axis more than hidden states, the axis of heads."""
    if isinstance(hidden, list | tuple):
        return any(getattr(layer, "ndim", 0) == 4 for layer in hidden)
    shape = tuple(getattr(hidden, "shape", ()))
    square = len(shape) == 4 and batch_axis is None and shape[-1] == shape[-2]
    return square or len(shape) == 5


def stack_layers(hidden: Any, batch_axis: int | None, kind: str) -> AnyArray:
    """Stack arrays of a kind, its axes behind [l] or [l, b].

    Args:
        hidden, batch_axis: See `profile`.
        kind: "tokens" or "attention".
    """
    subject, axes = KINDS[kind]
    if hasattr(hidden, "layer_axis"):  # a Trace
        batch_axis = 1 - hidden.layer_axis if hidden.hidden.ndim == 4 else None
        hidden = hidden.hidden if kind == "tokens" else hidden.attention
    elif isinstance(hidden, Mapping):
        raise ValueError(
            f"{subject} are a {type(hidden).__name__} with {', '.join(map(str, hidden))}: "
            "pass one array or list of arrays, such as output.hidden_states"
        )
    refuse_if(
        hidden is None or (isinstance(hidden, list | tuple) and any(h is None for h in hidden)),
        f"{subject} are None: a model of transformers returns its attention weights only if it is "
        'loaded with attn_implementation="eager"; for fused attention see rc.attention_rows',
    )
    if isinstance(hidden, list | tuple):
        layers = [as_floats(h) for h in hidden]
        shapes = {tuple(h.shape) for h in layers}
        refuse_if(len(shapes) != 1, f"{subject} have different shapes, or there are none: {shapes}")
        traced = next((h for h in layers if is_jax_array(h)), layers[0])
        hidden = namespace(traced).stack([match_framework(traced, h)[1] for h in layers])
        batch_axis = 1 if batch_axis is None and hidden.ndim == len(axes) + 2 else batch_axis
    hidden, letters = as_floats(hidden), ", ".join(axes)
    leading, shape = hidden.ndim - len(axes), tuple(hidden.shape)
    batch_axes = (None,) if leading == 1 else (0, 1)
    refuse(
        (
            leading not in (1, 2) or not shape[0],
            f"{subject} of shape {shape} are not [l, {letters}] or [l, b, {letters}]",
        ),
        (
            batch_axis not in batch_axes,
            f"batch_axis={batch_axis} does not fit {subject} of shape {shape}: it is 1 for "
            f"[l, b, {letters}], 0 for [b, l, {letters}] as jax.vmap returns it, and "
            f"None for [l, {letters}]",
        ),
    )
    return namespace(hidden).moveaxis(hidden, 0, 1) if batch_axis == 0 else hidden
