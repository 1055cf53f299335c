"""All paths of each length, summed exactly in one pass beside the forward pass.

With attention weights, norm statistics and MLP gates frozen every sublayer is affine, so that the
(1+H)^L paths collect into one channel per length,
    C_k^l = λ C_k^{l−1} + γ Σ_h P_h^l C_{k−1}^{l−1} W_h^l,   C_0^0 = X,
norms and MLPs applied channel by channel, biases in a channel of their own. The channels sum to
the output. Cost: about L/2 + 1 uses of the value, output and MLP matrices, not (1+H)^L.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rank_collapse.network import attention as attn
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import block, input_states, make_context, per_layer
from rank_collapse.paths import frozen
from rank_collapse.paths.channels import Layout, advance


@struct.dataclass
class PathContributions:
    """The output of a network, split by the length of the paths that carry it.

    `by_length, offset = contributions` unpacks the two that sum to the output.

    Attributes:
        by_length: [L + 1, n, d] or, by attention length and number of MLPs, [L + 1, L + 1, n, d].
        offset: [n, d], what the biases contribute.
        from_memory: The part of by_length whose paths start at the memory; None without one.
        output: [n, d], the network's own output, from the same pass.
    """

    by_length: Any
    offset: Any
    from_memory: Any = None
    output: Any = None

    def __iter__(self):
        return iter((self.by_length, self.offset))

    @property
    def total(self) -> Array:
        """Σ_k C_k + offset: the output, unless something was left out."""
        return self.by_attention_length.sum(axis=0) + self.offset

    @property
    def by_attention_length(self) -> Array:
        """[L + 1, n, d], summed over the number of MLPs where they are told apart."""
        return self.by_length.sum(axis=1) if self.by_length.ndim == 4 else self.by_length

    @property
    def by_mlp_count(self) -> Array:
        """[L + 1, n, d], summed over attention lengths.

        Raises:
            ValueError: Contributions made without `count_mlps`.
        """
        if self.by_length.ndim != 4:
            raise ValueError("the number of MLPs was not counted: give count_mlps=True")
        return self.by_length.sum(axis=0)

    def up_to(self) -> Array:
        """[L + 1, n, d]: the output of paths of lengths 0 .. k and the offset, for each k."""
        return jnp.cumsum(self.by_attention_length, axis=0) + self.offset[None]

    def all_but(self) -> Array:
        """[L + 1, n, d]: the output without the paths of length k, for each k."""
        return self.total[None] - self.by_attention_length


def path_contributions(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    bias: Any = None,
    memory: Any = None,
    memory_mask: Any = None,
    segments: Any = None,
    positions: Any = None,
    count_mlps: bool = False,
    keep_heads: Any = None,
    keep_attention: Any = None,
    keep_cross: Any = None,
    keep_mlp: Any = None,
) -> PathContributions:
    """Exact sums over all frozen paths of each length: Σ_k C_k + offset = output.

    Frozen: attention weights, norm statistics and MLP gates are those of the full forward pass.
    A path takes one head or the skip at each layer; its length counts the heads. A path from the
    memory begins with a head of a cross-attention, which counts too. MLPs are passed as a whole,
    skip and branch, unless `count_mlps` tells the branches apart.

    The keeps multiply branches and change nothing that is frozen: 0 leaves a branch out, and the
    derivative with respect to one is the sum of all paths through that branch. Differentiable;
    memory O(L n d), or O(L² n d) with `count_mlps`.

    Args:
        params: Parameters.
        x: Hidden states [n, d], or token ids [n] where the config has an embedding.
        config: The network.
        mask, bias, memory, memory_mask, segments, positions: As in `apply`.
        count_mlps: Also split by the number of MLP branches on the path.
        keep_heads: [L, h] multiplies self-attention heads, their value biases included.
        keep_attention: [L] multiplies self-attention branches, output bias included.
        keep_cross: [L] multiplies cross-attention branches.
        keep_mlp: [L] multiplies MLP branches.

    Returns:
        `PathContributions`, of the state after the final norm where the config has one.

    Raises:
        ValueError: As `apply`, or a keep of the wrong shape.

    Source: Theorem 2.1 of Dong et al. 2021, summed by length as in its section 2.1.
    """
    x = input_states(params, x, config, segments=segments, positions=positions)
    if config.cross_attention and memory is None:
        raise ValueError("cross_attention=True needs a memory [m, d]")
    keeps = {"heads": keep_heads, "attention": keep_attention, "cross": keep_cross}
    keeps = _checked_keeps(keeps | {"mlp": keep_mlp}, config, x.dtype)
    context = make_context(
        params, config, x.shape[0], mask=mask, bias=bias, segments=segments, positions=positions
    )
    memory_context = attn.AttentionContext(mask=attn.combine_masks(memory_mask))
    layout = Layout(config=config, count_mlps=count_mlps)

    def body(carry, step):
        state, channels = carry
        layer, (gains, keep) = step
        trace = block(
            layer, state, config, context, gains, memory=memory, memory_context=memory_context
        )
        constants = frozen.freeze_layer(layer, state, trace, config, gains)
        return (
            trace.hidden,
            advance(layer, constants, channels, memory, layout, gains, keep),
        ), None

    # Recomputing a layer in the backward pass keeps gradients in O(L² n d).
    body = jax.checkpoint(body, prevent_cse=False)
    state, channels = x, layout.begin(x)
    swept = (per_layer(config, x.dtype), keeps)
    for first, last in layout.groups():
        rows = slice(first, last)
        steps = (_rows(params, config, rows), _slice(swept, rows))
        carry = (state, layout.grow(channels, last))
        (state, channels), _ = jax.lax.scan(body, carry, steps)
    output = state
    if config.final_norm:
        scale, norm = frozen.frozen_scale(state, config), params.final_norm
        channels = channels.map(lambda c, ones: frozen.frozen_norm(norm, scale, c, ones, config))
        output = layers.norm(norm, state, config.norm, config.norm_eps)
    by_length, from_memory = layout.finish(channels.start), layout.finish(channels.memory)
    if from_memory is not None:
        by_length = by_length + from_memory
    return PathContributions(
        by_length=by_length, offset=channels.offset, from_memory=from_memory, output=output
    )


def head_contributions(
    params: TransformerParams, x: Any, config: TransformerConfig, **options: Any
) -> Float[Array, "l h n d"]:
    """Sum of all paths through each head of each layer, of whatever length, biases included.

    The output is linear in the gain of each head once everything is frozen, so that the sum is
    the derivative with respect to `keep_heads`. Paths that pass two heads count for both.

    Args:
        params, x, config: As in `path_contributions`.
        **options: Its other arguments, but for keep_heads.
    """

    def total(keep):
        return path_contributions(params, x, config, keep_heads=keep, **options).total

    keep = jnp.ones((config.depth, config.num_heads), params.layers.attention.w_v.dtype)
    return jnp.moveaxis(jax.jacfwd(total)(keep), (0, 1), (2, 3))


def _slice(tree, rows):
    return jax.tree.map(lambda a: a[rows], tree)


def _rows(params, config, rows):
    """Parameters of some layers, stacked."""
    if config.layer_map:
        rows = jnp.asarray(config.layer_map[rows])
    return _slice(params.layers, rows)


def _checked_keeps(keeps, config, dtype):
    present = {"cross": config.cross_attention, "mlp": config.mlp != "none"}
    checked = {}
    for name, keep in keeps.items():
        if keep is not None:
            keep = jnp.asarray(keep, dtype)
            shape = (config.depth, config.num_heads) if name == "heads" else (config.depth,)
            if keep.shape != shape:
                raise ValueError(f"keep_{name} of shape {keep.shape} is not {shape}")
            if not present.get(name, True):
                raise ValueError(f"keep_{name} is given but the network has no such branch")
        checked[name] = keep
    return checked
