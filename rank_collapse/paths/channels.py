"""Channels of paths, by attention length and number of MLPs, and how one frozen layer moves them.

The paths that start at the input, and those that start at the memory of cross-attention, are
sums [a, m, n, d]; biases travel in an offset [n, d]. Slots that must be empty are not stored:
after l layers there are l + 1 lengths with skips, one without.
"""

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import BlockParams
from rank_collapse.paths import frozen

# Layers are compiled in at most this many groups of two or more, each with the slots its last layer
# needs. More groups compute fewer empty slots, fewer compile faster: for BERT-base, groups of one
# layer take a tenth less time to run than groups of two, and four times as long to compile.
MAX_GROUPS = 6


@struct.dataclass
class Channels:
    """Sums of paths so far.

    Attributes:
        start: [a, m, n, d], paths from the input.
        memory: [a, m, n, d], paths from the memory; None without cross-attention.
        offset: [n, d], what biases contributed.
    """

    start: Any
    memory: Any
    offset: Any

    def map(self, fn: Any, lengths: int | None = None, counts: int | None = None) -> "Channels":
        """fn(c [g, n, d], ones [g]) of all channels at once, or of the first slots of each axis."""
        groups = [g for g in (self.start, self.memory) if g is not None]
        groups = [g[:lengths, :counts] for g in groups]
        n, d = self.offset.shape
        flat = jnp.concatenate([*(g.reshape(-1, n, d) for g in groups), self.offset[None]])
        ones = jnp.zeros(len(flat), flat.dtype).at[-1].set(1)
        out = fn(flat, ones)
        half = out[:-1].reshape(len(groups), *groups[0].shape)
        memory = None if self.memory is None else half[1]
        return Channels(start=half[0], memory=memory, offset=out[-1])


@struct.dataclass
class Layout:
    """Which slots exist after a number of layers; static.

    Attributes:
        config: The network.
        count_mlps: Whether paths are told apart by the MLP branches they pass.
    """

    config: TransformerConfig = struct.field(pytree_node=False)
    count_mlps: bool = struct.field(pytree_node=False)

    @property
    def counted(self) -> bool:
        """Whether there is anything to count."""
        return self.count_mlps and self.config.mlp != "none"

    @property
    def one_length(self) -> bool:
        """Without skips all paths are of length l: one slot, whose meaning moves with the layer."""
        return not self.config.attention_skip and not self.config.cross_attention

    @property
    def one_count(self) -> bool:
        """Nothing is counted, or without skips all paths pass all MLPs."""
        moving = not self.config.mlp_skip and not self.config.cross_attention
        return not self.counted or moving

    def slots(self, num_layers: int) -> tuple[int, int]:
        """Size of the two slot axes after that many layers."""
        return (
            1 if self.one_length else num_layers + 1,
            1 if self.one_count else num_layers + 1,
        )

    def groups(self) -> list[tuple[int, int]]:
        """Ranges of layers to compile together."""
        depth = self.config.depth
        grows = not (self.one_length and self.one_count)
        number = min(MAX_GROUPS, max(depth // 2, 1)) if grows else 1
        borders = [i * depth // number for i in range(number + 1)]
        return list(pairwise(borders))

    def begin(self, x: Float[Array, "n d"]) -> Channels:
        """C_0^0 = X and no offset."""
        zeros = jnp.zeros_like(x)
        memory = zeros[None, None] if self.config.cross_attention else None
        return Channels(start=x[None, None], memory=memory, offset=zeros)

    def grow(self, channels: Channels, num_layers: int) -> Channels:
        """Room for the slots of that many layers."""

        def pad(group):
            if group is None:
                return None
            more = [(0, s - t) for s, t in zip(self.slots(num_layers), group.shape, strict=False)]
            return jnp.pad(group, (*more, (0, 0), (0, 0)))

        return channels.replace(start=pad(channels.start), memory=pad(channels.memory))

    def finish(self, group: Any) -> Any:
        """[L + 1, L + 1, n, d] with the slots in their final places; without the second axis
        where `count_mlps` is False."""
        if group is None:
            return None
        depth = self.config.depth
        before = (depth * self.one_length, depth * (self.one_count and self.counted))
        sizes = (depth + 1, depth + 1 if self.count_mlps else 1)
        pads = [(b, s - b - t) for b, s, t in zip(before, sizes, group.shape, strict=False)]
        group = jnp.pad(group, (*pads, (0, 0), (0, 0)))
        return group if self.count_mlps else group[:, 0]


def advance(
    params: BlockParams,
    constants: frozen.FrozenLayer,
    channels: Channels,
    memory: Any,
    layout: Layout,
    gains: dict[str, Any],
    keep: dict[str, Any],
) -> Channels:
    """Channels after one layer with its constants frozen.

    Args:
        params: Parameters of the layer.
        constants: From `frozen.freeze_layer`.
        channels: Before the layer.
        memory: [m, d] or None.
        layout: Which slots there are.
        gains: skip_gain and branch_gain of the layer.
        keep: heads [h], attention, cross, mlp (scalars): multipliers of branches, or None.
    """
    config = layout.config
    skip_gain, branch_gain = gains["skip_gain"], gains["branch_gain"]

    def gain_of(name):
        return branch_gain if keep[name] is None else branch_gain * keep[name]

    def normed(placement, norm_params, scale, c, ones):
        if config.norm_placement != placement:
            return c
        return frozen.frozen_norm(norm_params, scale, c, ones, config)

    def sublayer(channels, branch, norm_params, scale, skip, gain, shift_axis):
        """N(λ c·[skip] + γ branch(N(c))), the branch's slots one further along shift_axis."""

        def branch_of(c, ones):
            return gain * branch(normed("pre", norm_params, scale, c, ones), ones)

        drop_last = [None, None]
        if shift_axis is not None:
            drop_last[shift_axis] = -1
        through = channels.map(branch_of, *drop_last)

        def combine(c, b, axis):
            if axis is not None:
                b = jnp.pad(b, [(int(i == axis), 0) for i in range(4)])
            return skip_gain * c + b if skip else b

        total = Channels(
            start=combine(channels.start, through.start, shift_axis),
            memory=None
            if channels.memory is None
            else combine(channels.memory, through.memory, shift_axis),
            offset=combine(channels.offset, through.offset, None),
        )
        return total.map(lambda c, ones: normed("post", norm_params, scale, c, ones))

    weights = constants.weights
    if keep["heads"] is not None:
        weights = weights * keep["heads"][:, None, None]
    channels = sublayer(
        channels,
        lambda c, ones: frozen.frozen_attention(params.attention, weights, c, ones),
        params.attention_norm,
        constants.attention_scale,
        config.attention_skip,
        gain_of("attention"),
        None if layout.one_length else 0,
    )
    if config.cross_attention:
        channels = _cross(params, constants, channels, memory, config, skip_gain, gain_of("cross"))
        channels = channels.map(
            lambda c, ones: normed("post", params.cross_norm, constants.cross_scale, c, ones)
        )
    if config.mlp == "none":
        return channels
    return sublayer(
        channels,
        lambda c, ones: frozen.frozen_mlp(params.mlp, constants.gate, c, ones),
        params.mlp_norm,
        constants.mlp_scale,
        config.mlp_skip,
        gain_of("mlp"),
        None if layout.one_count else 1,
    )


def _cross(params, constants, channels, memory, config, skip_gain, gain):
    """Paths from the memory enter with length 1; all others pass by the skip alone."""
    own = jnp.stack([memory, jnp.zeros_like(memory)])
    ones = jnp.asarray([0, 1], memory.dtype)
    entering, bias = gain * frozen.frozen_attention(
        params.cross, constants.cross_weights, own, ones
    )
    passing = skip_gain if config.cross_skip else jnp.zeros_like(skip_gain)
    return Channels(
        start=passing * channels.start,
        memory=(passing * channels.memory).at[1, 0].add(entering),
        offset=passing * channels.offset + bias,
    )
