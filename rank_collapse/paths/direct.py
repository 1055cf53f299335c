"""The output as a sum of direct contributions: of the input, heads, MLPs and biases.

Unlike paths, which pass all later layers, a part here reaches the output by skips and frozen norms
alone. `logit_attribution` reads logits from such parts, or from sums of paths.
"""

import jax
import jax.numpy as jnp

from rank_collapse import struct
from rank_collapse.annotations import AnyArray, ArrayLike, DType, Leaf
from rank_collapse.network.config import TransformerConfig
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

    start: Leaf
    heads: Leaf
    mlps: Leaf | None
    cross: Leaf | None
    offset: Leaf

    @property
    def total(self) -> Leaf:
        """The sum of all parts: the output."""
        layers = [p.sum(axis=-3) for p in (self.mlps, self.cross) if p is not None]
        return sum(layers, self.start + self.offset + self.heads.sum(axis=(-4, -3)))


@full_precision
def direct_contributions(
    params: TransformerParams, x: ArrayLike, config: TransformerConfig, **inputs: ArrayLike | None
) -> DirectContributions:
    """Split the output into the direct contribution of each part, norm statistics fixed.

    With post-norms a part passes every norm after it; with pre-norms only the final norm.

    Args:
        params, x, config: See `apply`.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`; what an
            edit of a state does to its parts is as in `path_contributions`.

    Raises:
        ValueError: In the same cases as `apply`.

    Source: the residual stream of Elhage et al. 2021, A mathematical framework for transformer
    circuits.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    rows = _written_rows(params, prepared, config)
    l, h = config.depth, config.num_heads
    mlp_row = 1 + l * h + l * config.cross_attention
    return DirectContributions(
        start=rows[0],
        heads=rows[1 : 1 + l * h].reshape(l, h, *rows.shape[1:]),
        mlps=rows[mlp_row:-1] if config.mlp != "none" else None,
        cross=rows[1 + l * h : mlp_row] if config.cross_attention else None,
        offset=rows[-1],
    )


class _WrittenRows(Frozen):
    """Rows [r, n, d]: the input, the outputs of each head, cross-attention and MLP, and the offset.

    Output biases of attention are in the offset.
    """

    def __init__(self, num_rows: int, config: TransformerConfig, dtype: DType):
        super().__init__(jnp.zeros(num_rows, dtype).at[-1].set(1))
        cross_row = 1 + config.depth * config.num_heads
        mlp_row = cross_row + config.depth * config.cross_attention
        self.first_row = {"attention": 1, "cross": cross_row, "mlp": mlp_row}

    def apply_branch(self, layer, kind, branch_input):
        """Put the output of each head, or of the other branch, into its row, and a bias into the
        last row.

        Returns:
            (the rows of all heads, branches and the bias; no further results: None).
        """
        trace, rows = layer.extra.trace, jnp.zeros_like(branch_input)
        if kind == "attention":
            bias = jnp.broadcast_to(layer.params.attention.b_o, (1, *branch_input.shape[1:]))
            outputs = jnp.concatenate([trace.kept["head_output"], bias])
            ones = jnp.zeros(len(outputs), branch_input.dtype).at[-1].set(1)
            outputs = carry_edit(layer, "attention_branch", outputs, ones)
            rows, outputs = rows.at[-1].set(outputs[-1]), outputs[:-1]
        else:
            outputs = getattr(trace, f"{kind}_branch")[None]
        row = self.first_row[kind] + layer.index * len(outputs)
        return jax.lax.dynamic_update_slice(rows, outputs, (row, 0, 0)), None


@jax.jit
def _written_rows(params, prepared, config):
    """Carry the outputs of all parts to the output of the network: the rows of `_WrittenRows`
    there.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
    """
    constants, final_constants = freeze(params, prepared, config, keep=("head_output",))
    num_rows = 2 + config.depth * (config.num_heads + len(config.kinds) - 1)
    algebra = _WrittenRows(num_rows, config, prepared.x.dtype)

    def step(layer, rows):
        return walk_layer(algebra, layer, rows)[0], None

    rows = jnp.zeros((num_rows, *prepared.x.shape), prepared.x.dtype).at[0].set(prepared.x)
    rows, _ = walk_layers(step, rows, params, prepared, config, extra=constants)
    return apply_final_norm(algebra, rows, params, prepared, config, final_constants)


@full_precision
def logit_attribution(contributions: ArrayLike, unembedding: ArrayLike) -> AnyArray:
    """Compute each part's share of the logits x W + b: its product with W; b joins the offset.

    The final norm is already frozen in the contributions. So if they sum to the output
    (`direct_contributions` by head and MLP, `path_contributions` by length), their shares sum to
    the logits. `head_contributions` count a path for every head on it and do not sum.

    Args:
        contributions: `DirectContributions`, `PathContributions`, or an array [..., n, d].
        unembedding: (w [d, c], b [c]) as in `Classifier`, or w alone (GPT-2: the embedding's
            transpose). For the difference of two logits, w[:, a] − w[:, b], [d, 1].

    Returns:
        The same structure with [..., n, c] instead of [..., n, d].

    Raises:
        ValueError: An unembedding of another width, or whose w and b do not fit.

    Example:
        parts = rc.direct_contributions(params, ids, config)
        shares = rc.logit_attribution(parts, w[:, [right]] - w[:, [wrong]])
        shares.heads[:, :, -1, 0]  # [L, h], of the difference of the last token's two logits
    """
    w, b = unembedding if isinstance(unembedding, tuple | list) else (unembedding, None)
    w = jnp.asarray(w)
    b = jnp.zeros(w.shape[-1:], w.dtype) if b is None else jnp.asarray(b)
    if b.shape != w.shape[-1:]:
        raise ValueError(
            f"unembedding has w of shape {w.shape} and b of shape {b.shape}, but must be w [d, c] "
            "and b [c]"
        )
    leaves = jax.tree.leaves(contributions)
    if w.ndim != 2 or any(a.shape[-1] != w.shape[0] for a in leaves):
        widths = sorted({a.shape[-1] for a in leaves})
        raise ValueError(
            f"unembedding has the shape {w.shape}, but must be [d, c], and the contributions have "
            f"the width d={', '.join(map(str, widths))}"
        )
    logits = jax.tree.map(lambda a: jnp.einsum("...d,dc->...c", a, w), contributions)
    if isinstance(contributions, PathContributions | DirectContributions):
        for name in ("offset", "output"):
            without_bias = getattr(logits, name, None)
            if without_bias is not None:
                bias = jnp.broadcast_to(b, without_bias.shape)
                logits = logits.replace(**{name: without_bias + bias})
    return logits
