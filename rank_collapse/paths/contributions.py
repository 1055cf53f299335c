"""All paths of each length, summed exactly in one pass beside the forward pass.

With attention weights, norm statistics and MLP gates frozen every sublayer is affine, so that the
(1+H)^L paths collect into one channel per length,
    C_k^l = λ C_k^{l−1} + γ Σ_h P_h^l C_{k−1}^{l−1} W_h^l,   C_0^0 = X,
norms and MLPs applied channel by channel, biases in a channel of their own. The channels sum to
the output. Cost: about L/2 + 1 uses of the value, output and MLP matrices, not (1+H)^L.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse import struct
from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry, enter
from rank_collapse.network.gains import LayerGains, layer_gains
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import Layer
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import block
from rank_collapse.paths import frozen
from rank_collapse.paths.channels import Channels, Layout, advance


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


@full_precision
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
    head_gain: Any = None,
    attention_gain: Any = None,
    cross_gain: Any = None,
    mlp_gain: Any = None,
    edit: Any = None,
) -> PathContributions:
    """Exact sums over all frozen paths of each length: Σ_k C_k + offset = output.

    Frozen: attention weights, norm statistics and MLP gates are those of the full forward pass.
    A path takes one head or the skip at each layer; its length counts the heads. A path from the
    memory begins with a head of a cross-attention, which counts too. MLPs are passed as a whole,
    skip and branch, unless `count_mlps` tells the branches apart.

    The gains here multiply branches and change nothing that is frozen: 0 leaves a branch out, and
    the derivative with respect to one is the sum of all paths through that branch.
    Differentiable; memory O(L n d), or O(L² n d) with `count_mlps`.

    Args:
        params: Parameters.
        x: Hidden states [n, d], or token ids [n] where the config has an embedding.
        config: The network.
        mask, bias, memory, memory_mask, segments, positions: As in `apply`.
        count_mlps: Also split by the number of MLP branches on the path.
        head_gain: [L, h] multiplies self-attention heads, their value biases included.
        attention_gain: [L] multiplies self-attention branches, output bias included.
        cross_gain: [L] multiplies cross-attention branches.
        mlp_gain: [L] multiplies MLP branches.
        edit: As in `apply`. What it makes of scores and weights is frozen with them; of a state,
            every length passes its derivative and what is left joins the offset: a branch set to
            0 leaves all lengths, a constant put in its place belongs to the offset.

    Returns:
        `PathContributions`, of the state after the final norm where the config has one.

    Raises:
        ValueError: As `apply`, or a gain of the wrong shape.

    Source: Theorem 2.1 of Dong et al. 2021, summed by length as in its section 2.1.
    """
    if isinstance(count_mlps, jax.core.Tracer):
        raise ValueError(
            "count_mlps changes the result's shape and cannot be traced: "
            "jax.jit(path_contributions, static_argnames='count_mlps')"
        )
    params, entry = enter(
        params, x, config, mask=mask, bias=bias, memory=memory, memory_mask=memory_mask,
        segments=segments, positions=positions, edit=edit,
    )  # fmt: skip
    gains = layer_gains(config, entry.x.dtype, params)
    factors = {"attention": attention_gain, "cross": cross_gain, "mlp": mlp_gain}
    head_gain, on_paths = path_gains(config, gains, head_gain, factors)
    return _contributions(params, entry, config, gains, on_paths, head_gain, count_mlps)


@functools.partial(jax.jit, static_argnames="count_mlps")
def _contributions(params, entry, config, gains, on_paths, head_gain, count_mlps):
    layout = Layout(config=config, count_mlps=count_mlps)

    def body(carry, step):
        state, channels = carry
        layer, (index, own, path_own, heads) = step
        trace = block(layer, state, config, own, entry, layer=index)
        seen = Layer(layer, own, index, state, trace)
        return (trace.hidden, moved(seen, channels, entry, layout, path_own, heads)), None

    # Recomputing a layer in the backward pass keeps gradients in O(L² n d).
    body = jax.checkpoint(body, prevent_cse=False)
    state, channels = entry.x, layout.begin(entry.x)
    swept = (jnp.arange(config.depth), gains, on_paths, head_gain)
    for first, last in layout.groups():
        rows = slice(first, last)
        steps = (layer_rows(params, config, rows), _slice(swept, rows))
        carry = (state, layout.grow(channels, last))
        (state, channels), _ = jax.lax.scan(body, carry, steps)
    return collected(params, state, channels, layout)


def moved(
    layer: Layer,
    channels: Channels,
    entry: Entry,
    layout: Layout,
    gains: LayerGains,
    head_gain: Any = None,
) -> Channels:
    """Channels after one layer, whose constants are those of its own computation.

    Args:
        layer: With what it computed.
        channels: Before it.
        entry: From `enter`.
        layout: Which slots there are.
        gains, head_gain: As in `advance`.
    """
    constants = frozen.freeze_layer(layer.params, layer.x, layer.trace, layout.config, layer.gains)
    return advance(
        layer.params, constants, channels, entry, layout, gains, head_gain, layer=layer.index
    )


def collected(
    params: TransformerParams, last: Array, channels: Channels, layout: Layout
) -> PathContributions:
    """The sums by length behind the last layer, the final norm frozen where there is one.

    Args:
        params: The final norm is read of them.
        last: The last hidden states [n, d].
        channels: Behind the last layer.
        layout: Which slots there are.
    """
    config, output = layout.config, last
    if config.final_norm:
        scale, norm = frozen.frozen_scale(last, config), params.final_norm
        channels = channels.map(lambda c, ones: frozen.frozen_norm(norm, scale, c, ones, config))
        output = layers.norm(norm, last, config.norm, config.norm_eps)
    by_length, from_memory = layout.finish(channels.start), layout.finish(channels.memory)
    if from_memory is not None:
        by_length = by_length + from_memory
    return PathContributions(
        by_length=by_length, offset=channels.offset, from_memory=from_memory, output=output
    )


@dataclasses.dataclass(frozen=True)
class LengthPass:
    """`path_contributions` layer by layer: a `LayerPass` whose result are `PathContributions`.

    All L + 1 lengths have their room from the start, and the lengths that exist are moved one
    after the other: one program for all layers, Σ_l (l + 1) uses of the value, output and MLP
    matrices, and no more memory than the channels and one branch of one length.

    Attributes:
        biased: Whether the network has biases; False: no offset is carried.
    """

    biased: bool = True
    forward: ClassVar[bool] = True

    def begin(self, entry: Entry, config: TransformerConfig) -> Channels:
        """X^0 in the slot of length 0, and room for the others."""
        layout = Layout(config=config, count_mlps=False)
        channels = layout.grow(layout.begin(entry.x), config.depth)
        return channels.replace(biased=self.biased)

    def step(
        self, layer: Layer, carry: Channels, entry: Entry, config: TransformerConfig
    ) -> tuple[Channels, None]:
        """The channels behind the layer."""
        layout = Layout(config=config, count_mlps=False)
        if not layout.one_length:
            carry = carry.replace(live=jnp.arange(config.depth + 1) <= layer.index)
        channels = moved(layer, carry, entry, layout, layer.gains)
        return channels.replace(live=None), None

    def finish(
        self,
        params: TransformerParams,
        last: Array,
        carry: Channels,
        told: None,
        entry: Entry,
        config: TransformerConfig,
    ) -> PathContributions:
        """The sums by length."""
        return collected(params, last, carry, Layout(config=config, count_mlps=False))


def _slice(tree, rows):
    return jax.tree.map(lambda a: a[rows], tree)


def layer_rows(params, config, rows):
    """Parameters of some layers, stacked."""
    if config.layer_map:
        rows = jnp.asarray(config.layer_map[rows])
    return _slice(params.layers, rows)


def path_gains(config, gains, head_gain, factors):
    """(head_gain [L, h] or None, gains with the factors [L] of each kind of branch).

    Raises:
        ValueError: A factor of the wrong shape, or of a branch the network does not have.
    """
    dtype = gains.temperature.dtype

    def checked(name, value, shape):
        value = jnp.asarray(value, dtype)
        if value.shape != shape:
            raise ValueError(f"{name}_gain of shape {value.shape} is not {shape}")
        if name not in ("head", *config.kinds):
            raise ValueError(f"{name}_gain is given but the network has no such branch")
        return value

    if head_gain is not None:
        head_gain = checked("head", head_gain, (config.depth, config.num_heads))
    branch = gains.branch
    for name, factor in factors.items():
        if factor is not None:
            own = getattr(branch, name)
            factor = checked(name, factor, (config.depth,)).reshape(-1, *[1] * (own.ndim - 1))
            branch = branch.replace(**{name: own * factor})
    return head_gain, gains.replace(branch=branch)
