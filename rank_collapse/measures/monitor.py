"""A few scalars of one layer that show collapse coming, at little cost for every training step.

Axis letters: b leading axes as one, n tokens, d width, h heads, m keys.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_api_compat import is_jax_array
from jaxtyping import Array, Float

from rank_collapse.measures import spikes
from rank_collapse.measures.arrays import (
    as_floats,
    beside,
    gathered,
    namespace,
    of_first_shard,
    where_it_lives,
    with_mask,
)
from rank_collapse.measures.norms import divide
from rank_collapse.measures.profiles import of_states
from rank_collapse.measures.table import MEASURES
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import Output, Walked, run
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import Layer
from rank_collapse.struct import refuse_if

TOKENS = ("residual_ratio", "token_cosine", "participation_ratio", "stable_rank_bound")
OF_PAIRS = ("residual_ratio", "spiked", "token_cosine")  # which say nothing of one token
ATTENTION = ("attention_entropy", "largest_weight", "largest_column", "sink_rate")


@where_it_lives
@full_precision
def monitor(
    x: Any,
    attention: Any = None,
    *,
    mask: Any = None,
    sink: float = 0.3,
    axis_name: str | None = None,
    tokens: spikes.TokenKind = "raw",
    norm: Callable[[Any], Any] | None = None,
    exclude: spikes.Excluded | None = None,
    threshold: float = spikes.SPIKE,
) -> dict[str, Float[Any, ""]]:
    """Scalars of one layer's tokens and attention weights, means over leading axes and heads.

    Of `MEASURES`, where what they mean is said: "residual_ratio", "token_cosine",
    "participation_ratio" and "stable_rank_bound"; with attention also "attention_entropy",
    "largest_weight", "largest_column" and "sink_rate". Also "spiked", the share of examples whose
    residual ratio is of one token (see `Profile`), and with `exclude` "left_out", how many tokens.

    Computed in float32 (float64 stays), without singular values, where the arrays are. A pure
    function: it works inside jit, scan, remat and vmap. Values that are not finite give NaN, not an
    error. Means leave out examples without a token, and residual ratio and cosine also those of
    one token; NaN where all are left out.
    Cost: 2 n d min(n, d) operations for G, and n m per head for the attention.

    Args:
        x: Tokens [..., n, d] of any framework.
        attention: Weights [..., h, n, m] with the same leading axes; None for none.
        mask: Bool [n] or [..., n], the tokens that exist; None for all. Where m = n they are the
            keys too, and the first key is the first that exists; elsewhere it is key 0.
        sink: Weight of the first key above which a head counts as a sink.
        axis_name: Inside `jax.shard_map`, the mesh axis over which tokens are sharded, queries of
            the attention with them: all are gathered and measured. Without it each shard's tokens
            are measured by themselves.
        tokens: "raw", as they are; "unit", x_i/|x_i|; "read", what attention reads, N(x).
        norm: N of "read", a function of x.
        exclude, threshold: "spikes" leaves out tokens longer than `threshold` times the median.

    Returns:
        Scalars by name.

    Raises:
        ValueError: Shapes that do not fit each other, fewer than two tokens, or an axis_name of no
            `shard_map`.
    """
    x, attention = (gathered(a, axis_name, -2) for a in (x, attention))
    x, mask = as_floats(x), gathered(mask, axis_name, -1)
    refuse_if(
        x.ndim < 2 or x.shape[-2] < 2,
        f"x of shape {x.shape} is not [..., n, d] with two tokens or more",
    )
    *leading, n, d = x.shape
    if mask is not None:
        x, mask = with_mask(x, mask, (*leading, n), "tokens")
        mask = mask.reshape((-1, n))
    read = None if norm is None else norm(x).reshape((-1, n, d))
    choice = {"tokens": tokens, "exclude": exclude, "threshold": threshold}
    x, chosen, left_out = spikes.chosen_tokens(x.reshape((-1, n, d)), mask, read, **choice)
    given = {"x": x, "shown": chosen, "mask": mask}
    if attention is not None:
        p = as_floats(attention)
        refuse_if(
            tuple(p.shape[:-3]) != tuple(leading) or p.ndim < 3,
            f"attention of shape {tuple(p.shape)} is not [..., h, n, m] beside x of "
            f"{(*leading, n, d)}",
        )
        refuse_if(p.shape[-2] != n, f"attention of shape {tuple(p.shape)} has not {n} queries")
        given["p"] = beside(x, p.reshape((-1, *p.shape[-3:])))[1]
    found = (_compiled if is_jax_array(x) else _means)(given, sink)
    if left_out is not None:
        found["left_out"] = left_out.sum()
    return of_first_shard(found, axis_name)


def _means(given, sink):
    """Means over examples [b], of those that have enough tokens."""
    x, mask, p = given["x"], given["mask"], given.get("p")
    found = of_states(TOKENS, x, given["shown"])
    found["spiked"] = namespace(x).astype(found["spiked"], x.dtype)
    of_tokens = dict.fromkeys(found, given["shown"])
    if p is not None:
        own = {"sink": sink, "key_mask": mask if p.shape[-1] == x.shape[-2] else None}
        for name in ATTENTION:
            each = MEASURES[name](p, mask=mask, **(own if name == "sink_rate" else {}))
            found[name] = each.mean(axis=-1) if each.ndim > 1 else each
    means = {}
    for name, values in found.items():
        shown = of_tokens.get(name, mask)
        if shown is None:
            means[name] = values.mean()
            continue
        xp, least = namespace(values), 2 if name in OF_PAIRS else 1
        enough = xp.sum(shown, axis=-1) >= least
        means[name] = divide(xp.sum(xp.where(enough, values, 0)), xp.sum(enough))
    return means


_compiled = jax.jit(_means)


def monitored(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    attention: bool = True,
    **inputs: Any,
) -> tuple[Float[Array, "n d"], dict[str, Float[Array, "l"]]]:
    """(output, scalars): the forward pass, and `monitor` of each layer's states and attention.

    The scalars are computed inside the scan over the layers, so that no layer's attention weights
    are kept for them, and carry no gradient. Their dictionary is what `jax.value_and_grad(...,
    has_aux=True)` takes.

    Args:
        params, x, config: As in `rank_collapse.apply`.
        attention: Whether to measure the attention weights too.
        **inputs: Other inputs of `apply`; of a mask [n], which tokens exist, these are measured.

    Returns:
        The output [n, d], and scalars [L] by name.

    Raises:
        ValueError: As `apply`, or fewer than two tokens.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run(MonitorPass(attention), params, prepared, config)


@dataclasses.dataclass(frozen=True)
class MonitorPass(Output):
    """`monitored` layer by layer."""

    attention: bool = True

    def step(self, layer: Layer, x: Any, seen: Any, carry: Any) -> tuple[Any, Any]:
        """The layer's scalars."""
        trace = seen.trace
        hidden, weights = jax.lax.stop_gradient((trace.hidden, trace.attention))
        weights = weights if self.attention else None
        return carry, monitor(hidden, weights, mask=layer.inputs.token_mask)

    def finish(self, walked: Walked) -> tuple[Float[Array, "n d"], dict[str, Float[Array, "l"]]]:
        """(output, scalars)."""
        return walked.output, walked.found


# How libraries name the weights of queries, keys and values; a part of a leaf's path is compared.
PARTS = {
    "query": frozenset(("w_q", "wq", "q", "query", "q_proj", "q_lin", "to_q", "query_proj")),
    "key": frozenset(("w_k", "wk", "k", "key", "k_proj", "k_lin", "to_k", "key_proj")),
    "value": frozenset(("w_v", "wv", "v", "value", "v_proj", "v_lin", "to_v", "value_proj")),
}


@full_precision
def monitor_gradients(
    gradients: Any,
    *,
    layer_axis: int | None = None,
    parts: Mapping[str, str | Sequence[str] | Mapping[str, int]] | None = None,
    axis: int | None = None,
) -> dict[str, Float[Array, ""] | Float[Array, "l"]]:
    """Norms of the gradients of queries', keys' and values' weights, of any tree of a network.

    "query_gradient", "key_gradient", "value_gradient": √(Σ g²) over all leaves whose path has a
    name of `PARTS` in it, biases too. At rank collapse the first two vanish (Noci et al. 2022).

    Args:
        gradients: Of a pytree of parameters: ours, Flax's, boxed or not, Equinox's, or a dictionary
            by names such as "layers.0.attention.q_proj.weight".
        layer_axis: Of every such leaf, where layers are stacked: then norms are by layer, [l].
        parts: Further names beside `PARTS`: {part of a leaf's path: what the leaf holds}. A leaf
            may hold one part, {"w_query": "query"}, equal shares, {"c_attn": ("query", "key",
            "value")}, or shares of these widths, {"c_attn": {"query": 512, "key": 128, "value":
            128}}.
        axis: The axis along which `parts` splits a leaf. None takes the only axis that fits: its
            length is divisible by the number of shares, or is the sum of the widths. With an axis,
            widths may have another unit, such as heads.

    Returns:
        Norms by name, without the parts that no leaf is named after.

    Raises:
        ValueError: No leaf is named after queries, keys or values, an axis of layers that is not
            there or not of one length, or a leaf that cannot be split as its part says, or along
            more than one axis.
    """
    table = {name: part for part, names in PARTS.items() for name in names} | dict(parts or {})
    boxed = jax.tree_util.tree_leaves_with_path(gradients, is_leaf=_is_box)
    dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = [(dotted(path), a) for path, node in boxed for a in jax.tree.leaves(node)]
    squares: dict[str, Any] = {}
    for path, leaf in leaves:
        places = {name: f".{path}.".rfind(f".{name}.") for name in table}
        name = max(places, key=places.__getitem__)
        for part, piece in (
            _pieces(path, leaf, table[name], layer_axis, axis) if places[name] >= 0 else ()
        ):
            axes = tuple(range(layer_axis is not None, piece.ndim))
            square = jnp.sum(jnp.square(piece), axis=axes)
            known = squares.setdefault(part, jnp.zeros_like(square))
            if known.shape != square.shape:
                raise ValueError(
                    f"{path} of shape {leaf.shape} does not have {len(known)} layers along "
                    f"layer_axis={layer_axis}, as the other leaves have"
                )
            squares[part] = known + square
    if not squares:
        seen = ", ".join(path for path, _ in leaves[:3])
        raise ValueError(
            f"no leaf is named after queries, keys or values: {seen}, ...; parts= may name them"
        )
    return {f"{part}_gradient": jnp.sqrt(squares[part]) for part in PARTS if part in squares}


def _is_box(node):
    """Whether Flax, Linen or NNX, keeps one array in it, whose path would end in "value"."""
    return hasattr(node, "add_axis") and hasattr(node, "remove_axis")


def _pieces(path, leaf, held, layer_axis, axis):
    """(part, its array [l, ...] or [...]) of a leaf that holds one part or several."""
    leaf = as_floats(leaf)
    shape, axes = leaf.shape, range(-leaf.ndim, leaf.ndim)
    refuse_if(
        layer_axis is not None and layer_axis not in axes,
        f"{path} of shape {shape} has no axis layer_axis={layer_axis}",
    )
    pieces = [(held, leaf)]
    if not (isinstance(held, str) and held in PARTS):
        shares = dict(held) if isinstance(held, Mapping) else dict.fromkeys(held, 1)
        whole, ends = sum(shares.values()), np.cumsum([*shares.values()])[:-1]
        own = [i for i in range(leaf.ndim) if layer_axis is None or i != layer_axis % leaf.ndim]
        fits = [i for i in own if shape[i] and shape[i] % max(whole, 1) == 0]
        if axis is not None:
            fits = [i for i in fits if axis in (i, i - leaf.ndim)]
        elif isinstance(held, Mapping):
            fits = [i for i in fits if shape[i] == whole]
        if not shares.keys() <= PARTS.keys() or len(fits) != 1:
            along = f"axis={axis}" if axis is not None else "one axis alone, which axis= may name"
            raise ValueError(f"{path} of shape {shape} does not hold {held} side by side, {along}")
        ends = ends * (shape[fits[0]] // whole)
        pieces = zip(shares, jnp.split(leaf, ends, axis=fits[0]), strict=True)
    if layer_axis is None:
        return list(pieces)
    return [(part, jnp.moveaxis(piece, layer_axis, 0)) for part, piece in pieces]
