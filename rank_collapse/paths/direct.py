"""The output as a sum of direct contributions: of the input, heads, MLPs and biases.

Unlike paths, which pass what comes after them, a part here reaches the output by skips and frozen
norms alone. `logit_attribution` reads logits from such parts, or from sums of paths.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import apply_final_norm, walk_layer, walk_layers
from rank_collapse.paths.contributions import PathContributions
from rank_collapse.paths.frozen import Frozen, carry_edit, freeze


class DirectContributions(struct.Struct):
    """Parts of the output that sum to it.

    Attributes:
        start: [n, d], the input X^0.
        heads: [L, h, n, d], P_h (x W_v + b_v) W_o of each head.
        mlps: [L, n, d], each MLP with its biases; None without.
        cross: [L, n, d], each cross-attention with its biases; None without.
        offset: [n, d], biases of attention outputs and of norms.
    """

    start: struct.Leaf
    heads: struct.Leaf
    mlps: struct.Leaf | None
    cross: struct.Leaf | None
    offset: struct.Leaf

    @property
    def total(self) -> struct.Leaf:
        """The sum of all parts: the output."""
        layers = [p.sum(axis=-3) for p in (self.mlps, self.cross) if p is not None]
        return sum(layers, self.start + self.offset + self.heads.sum(axis=(-4, -3)))


@full_precision
def direct_contributions(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> DirectContributions:
    """The direct contribution of each part of the network to the output, norm statistics fixed.

    With post-norms a part passes every norm after it; with pre-norms the final norm alone.

    Args:
        params, x, config: As in `apply`.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`; what an
            edit of a state does to its parts is as in `path_contributions`.

    Raises:
        ValueError: As `apply`.

    Source: the residual stream of Elhage et al. 2021, A mathematical framework for transformer
    circuits.
    """
    params, prepared = prepare_inputs(params, x, config, covers=EVERYTHING, **inputs)
    c, _ = _rows(params, prepared, config, True)
    l, h = config.depth, config.num_heads
    mlp_row = 1 + l * h + l * config.cross_attention
    return DirectContributions(
        start=c[0],
        heads=c[1 : 1 + l * h].reshape(l, h, *c.shape[1:]),
        mlps=c[mlp_row:-1] if config.mlp != "none" else None,
        cross=c[1 + l * h : mlp_row] if config.cross_attention else None,
        offset=c[-1],
    )


class _Written(Frozen):
    """Rows [rows, n, d]: the input, what each attention, cross-attention and MLP wrote, the offset.

    Attention has one row a head, its output bias in the offset; or one row with everything.
    """

    def __init__(self, rows: int, config: TransformerConfig, by_head: bool, dtype: Any):
        super().__init__(jnp.zeros(rows, dtype).at[-1].set(1))
        self.by_head = by_head
        self.width = config.num_heads if by_head else 1
        self.first = {"attention": 1, "cross": 1 + config.depth * self.width}
        self.first["mlp"] = self.first["cross"] + config.depth * config.cross_attention

    def apply_branch(self, layer, kind, branch_input):
        if kind == "attention" and self.by_head:
            return self._by_head(layer, branch_input), None
        part = getattr(layer.extra.trace, f"{kind}_branch")
        return self._placed(layer, kind, jnp.zeros_like(branch_input), part[None]), None

    def _by_head(self, layer, branch_input):
        trace, params = layer.extra.trace, layer.params.attention
        bias = jnp.broadcast_to(params.b_o, (1, *branch_input.shape[1:]))
        parts = jnp.concatenate([trace.kept["head_output"], bias])
        shares = jnp.zeros(len(parts), branch_input.dtype).at[-1].set(1)
        parts = carry_edit(layer, "attention_branch", parts, shares)
        empty = jnp.zeros_like(branch_input).at[-1].set(parts[-1])
        return self._placed(layer, "attention", empty, parts[:-1])

    def _placed(self, layer, kind, rows, parts):
        row = self.first[kind] + layer.index * len(parts)
        return jax.lax.dynamic_update_slice(rows, parts, (row, 0, 0))


@functools.partial(jax.jit, static_argnames="by_head")
def _rows(params, prepared, config, by_head):
    """(rows at the output, the shares of rows in the stream after every sublayer)."""
    keep = ("head_output",) if by_head else ()
    constants, of_final = freeze(params, prepared, config, keep=keep)
    per_layer = len(config.kinds) - 1 + (config.num_heads if by_head else 1)
    count = 2 + config.depth * per_layer
    algebra = _Written(count, config, by_head, prepared.x.dtype)

    def step(layer, c):
        c, passages = walk_layer(algebra, layer, c)
        return c, jnp.stack([_shares(passage.output_state) for passage in passages.values()])

    c = jnp.zeros((count, *prepared.x.shape), prepared.x.dtype).at[0].set(prepared.x)
    first = _shares(c)
    c, shares = walk_layers(step, c, params, prepared, config, extra=constants)
    c = apply_final_norm(algebra, c, params, prepared, config, of_final)
    return c, jnp.concatenate([first[None], shares.reshape(-1, count)])


def _shares(c):
    c = c - c.mean(axis=-1, keepdims=True)
    whole = c.sum(axis=0)
    return jnp.einsum("snd,nd->s", c, whole) / jnp.sum(jnp.square(whole))


@full_precision
def variance_shares(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> Float[Array, "i j"]:
    """Cov(part_j, x_i)/Var x_i after every sublayer i, of the input, every branch j and the biases.

    With norm statistics frozen, as in `direct_contributions`, x_i is the sum of what its input, the
    branches 1 .. i and the biases of norms wrote, so that every row sums to 1 exactly; variances
    and covariances are over the features, as LayerNorm takes them, and averaged over tokens.
    `measures.dependency` gives the published β_ij², which are these where branches are uncorrelated
    and never negative; a share is negative where a branch takes away what others wrote.

    Args:
        params, x, config: As in `apply`.
        **inputs: mask, bias, memory, memory_mask, segments and positions of `apply`.

    Returns:
        [N + 1, N + 2]: row i the stream after i branches, columns the input, branches 1 .. N and
        the biases of the norms.

    Raises:
        ValueError: An edit; see also `apply`.
    """
    params, prepared = prepare_inputs(params, x, config, covers=_SHARES_COVER, **inputs)
    _, shares = _rows(params, prepared, config, False)
    l, kinds = config.depth, len(config.kinds)
    # From one block of rows for each kind of branch to the order in which branches are passed.
    order = jnp.arange(l * kinds).reshape(kinds, l).T.reshape(-1)
    return shares[:, jnp.concatenate([jnp.zeros(1, int), 1 + order, jnp.full(1, 1 + l * kinds)])]


_SHARES_COVER = dataclasses.replace(EVERYTHING, name="variance_shares", edits=())


@full_precision
def logit_attribution(
    contributions: Any, unembedding: Any, *, classes: int | tuple[int, int] | None = None
) -> Any:
    """Each part's share of the logits x W + b: its product with W; b belongs to the offset.

    The final norm is frozen in the contributions already, so that the shares of a sum that equals
    the output sum to the logits: `direct_contributions` by head and MLP, `path_contributions` by
    length. `head_contributions` count a path for every head on it and do not sum.

    Args:
        contributions: `DirectContributions`, `PathContributions`, or an array [..., n, d].
        unembedding: (w [d, c], b [c]) as of `Classifier`, or w alone (GPT-2: the embedding's
            transpose).
        classes: A class a for its logit alone, (a, b) for the difference of two logits; None for
            all. The axis of classes stays, then of size 1.

    Returns:
        The same structure with [..., n, c] in the place of [..., n, d].

    Raises:
        ValueError: An unembedding of another width, or a class that it has not.

    Example:
        parts = rc.direct_contributions(params, ids, config)
        shares = rc.logit_attribution(parts, unembedding, classes=(right, wrong))
        shares.heads[:, :, -1, 0]  # [L, h], of the difference of the last token's two logits
    """
    w, b = unembedding if isinstance(unembedding, tuple | list) else (unembedding, None)
    w = jnp.asarray(w)
    b = jnp.zeros(w.shape[-1:], w.dtype) if b is None else jnp.asarray(b)
    leaves = jax.tree.leaves(contributions)
    if w.ndim != 2 or any(a.shape[-1] != w.shape[0] for a in leaves):
        widths = sorted({a.shape[-1] for a in leaves})
        raise ValueError(
            f"unembedding of shape {w.shape} is not [d, c] for contributions of d={widths}"
        )
    if classes is not None:
        w, b = (_of_classes(a, classes) for a in (w, b))

    def share(a: Array) -> Array:
        return jnp.einsum("...d,dc->...c", a, w)

    shares = jax.tree.map(share, contributions)
    if not isinstance(contributions, PathContributions | DirectContributions):
        return shares
    whole = {name: getattr(shares, name, None) for name in ("offset", "output")}
    known = {name: a for name, a in whole.items() if a is not None}
    return shares.replace(**{name: a + jnp.broadcast_to(b, a.shape) for name, a in known.items()})


def _of_classes(a, classes):
    pair = classes if isinstance(classes, tuple | list) else (classes,)
    for index in pair:
        if not 0 <= index < a.shape[-1]:
            raise ValueError(f"class {index} is not in 0..{a.shape[-1] - 1}")
    struct.refuse_if(len(pair) > 2, f"classes={classes!r} is not one class or two")
    chosen = a[..., pair[0], None]
    return chosen if len(pair) == 1 else chosen - a[..., pair[1], None]
