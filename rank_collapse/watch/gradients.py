"""Norms of the gradients of queries, keys and values, of any tree of a network."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.annotations import Tree
from rank_collapse.checks import refuse_if
from rank_collapse.measures import on_jax
from rank_collapse.measures.arrays import as_floats, on_host
from rank_collapse.measures.norms import powers_of_four
from rank_collapse.printed import format_count, split_numbers
from rank_collapse.watch.names import PARTS


def monitor_gradients(
    gradients: Tree,
    *,
    layer_axis: int | None = None,
    by_layer: bool = False,
    parts: Mapping[str, str | Sequence[str] | Mapping[str, int]] | None = None,
    axis: int | None = None,
) -> dict[str, Float[Array, ""] | Float[Array, "l"]]:
    """Compute norms of the gradients of queries', keys' and values' weights, of any tree.

    "query_gradient", "key_gradient", "value_gradient": √(Σ g²) over all leaves whose path has a
    name of `PARTS` in it, biases too. Gradients are scaled first, so that no square overflows or
    vanishes. At rank collapse the first two vanish (Noci et al. 2022).

    Args:
        gradients: Gradients of a pytree of parameters: ours, Flax's (boxed or not), Equinox's, or a
            dictionary by names such as "layers.0.attention.q_proj.weight" or Haiku's
            "attention/query".
        layer_axis: Axis of the layers in every such leaf, where layers are stacked; norms are then
            by layer, [l].
        by_layer: Whether layers are separate modules, as in lists of Flax NNX and Equinox: norms
            are then by layer, [l], in natural order of the paths before these names, such as
            "layers.0.attention"; NaN where a layer has no such part.
        parts: Names in addition to `PARTS`: {part of a leaf's path: the parameters that the leaf
            holds}. A leaf may hold one part, {"w_query": "query"}, equal shares, {"c_attn":
            ("query", "key", "value")}, or shares of these widths, {"c_attn": {"query": 512, "key":
            128, "value": 128}}.
        axis: The axis along which `parts` splits a leaf. None takes the only axis that fits: its
            length is divisible by the number of shares, or is the sum of the widths. With an axis,
            widths may have another unit, such as heads.

    Returns:
        Norms by name, without the parts that no leaf is named after.

    Raises:
        ValueError: No leaf is named after queries, keys or values; `by_layer` and `layer_axis`
            together; an axis of layers that does not exist or has several lengths; a leaf that
            cannot be split as its part says, or along more than one axis.
    """
    refuse_if(by_layer and layer_axis is not None, "by_layer= and layer_axis= exclude each other")
    table = {name: part for part, names in PARTS.items() for name in names}
    table |= dict(parts or {})
    compute = functools.partial(
        _compute_norms, table=table, layer_axis=layer_axis, by_layer=by_layer, axis=axis
    )
    return on_jax.call_with_auto_axes(compute, gradients)


def _compute_norms(gradients, table, layer_axis, by_layer, axis):
    """Compute `monitor_gradients`.

    Args:
        gradients, layer_axis, by_layer, axis: See `monitor_gradients`.
        table: The parameters that a leaf holds, by the names that its path may have.
    """
    boxed = jax.tree_util.tree_leaves_with_path(  # a box of Flax has a path that ends in "value"
        gradients, is_leaf=lambda node: hasattr(node, "add_axis")
    )
    dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = [  # Haiku's names of modules have "/" in them
        (dotted(path).replace("/", "."), a) for path, node in boxed for a in jax.tree.leaves(node)
    ]
    pieces: dict[str, dict[str, list[Any]]] = {}  # of a part and a layer
    for path, leaf in leaves:
        places = {name: f".{path}.".rfind(f".{name}.") for name in table}
        name = max(places, key=places.__getitem__)
        if places[name] < 0:
            continue
        layer = path[: places[name]] if by_layer else ""
        for part, piece in _split_leaf(path, leaf, table[name], layer_axis, axis):
            earlier = pieces.setdefault(part, {}).setdefault(layer, [])
            if layer_axis is not None and earlier and len(earlier[0]) != len(piece):
                raise ValueError(
                    f"{path} of shape {leaf.shape} does not have "
                    f"{format_count(len(earlier[0]), 'layer')} along "
                    f"layer_axis={layer_axis}, as the other leaves have"
                )
            earlier.append(piece)
    if not pieces:
        examples = ", ".join(path for path, _ in leaves[:3])
        raise ValueError(
            f"no leaf is named after queries, keys or values: {examples}, ...; parts= may name them"
        )
    layer_names = set().union(*pieces.values())
    layer_names = sorted(layer_names, key=split_numbers)
    norms = {}
    for part in PARTS:
        if part in pieces:
            by_name = {  # {name of the layer: norm}
                name: _compute_norm(arrays, layer_axis is not None)
                for name, arrays in pieces[part].items()
            }
            values = [by_name.get(name, jnp.float32(jnp.nan)) for name in layer_names]
            norms[f"{part}_gradient"] = jnp.stack(values) if by_layer else values[0]
    return norms


def _compute_norm(pieces, has_layers):
    """Compute √(Σ g²) of several arrays [...], or of each of their layers [l, ...]."""
    flat = [a.reshape((len(a), -1) if has_layers else (-1,)) for a in pieces]  # [g] or [l, g]
    dtype = jnp.result_type(*(a.dtype for a in flat))
    sizes = [jnp.max(jnp.abs(a), axis=-1, initial=0).astype(dtype) for a in flat]
    largest = functools.reduce(jnp.maximum, sizes)  # [] or [l]
    scale, inverse = powers_of_four(largest)
    scaled = [a.astype(dtype) * inverse[..., None] for a in flat]
    squares = [jnp.sum(jnp.square(a), axis=-1) for a in scaled]
    return scale * jnp.sqrt(sum(squares))


def _split_leaf(path, leaf, held, layer_axis, axis):
    """Split a leaf into (part, its array [l, ...] or [...]).

    Args:
        path, leaf: Name and array of the leaf.
        held: Parameters that the leaf holds, in the form of `parts` in `monitor_gradients`.
        layer_axis, axis: See `monitor_gradients`.
    """
    leaf = jnp.asarray(on_host(as_floats(leaf)))
    shape, axes = leaf.shape, range(-leaf.ndim, leaf.ndim)
    refuse_if(
        layer_axis is not None and layer_axis not in axes,
        f"{path} of shape {shape} has no axis layer_axis={layer_axis}",
    )
    pieces = [(held, leaf)]
    if not (isinstance(held, str) and held in PARTS):
        shares = dict(held) if isinstance(held, Mapping) else dict.fromkeys(held, 1)
        num_shares, ends = sum(shares.values()), np.cumsum([*shares.values()])[:-1]
        axes = [i for i in range(leaf.ndim) if layer_axis is None or i != layer_axis % leaf.ndim]
        fits = [i for i in axes if shape[i] and shape[i] % max(num_shares, 1) == 0]
        if axis is not None:
            fits = [i for i in fits if axis in (i, i - leaf.ndim)]
        elif isinstance(held, Mapping):
            fits = [i for i in fits if shape[i] == num_shares]
        if not shares.keys() <= PARTS.keys() or len(fits) != 1:
            along = f"axis={axis}" if axis is not None else "one axis alone, which axis= may name"
            raise ValueError(f"{path} of shape {shape} does not hold {held} side by side, {along}")
        ends = ends * (shape[fits[0]] // num_shares)
        pieces = zip(shares, jnp.split(leaf, ends, axis=fits[0]), strict=True)
    if layer_axis is None:
        return list(pieces)
    return [(part, jnp.moveaxis(piece, layer_axis, 0)) for part, piece in pieces]
