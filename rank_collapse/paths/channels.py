"""Sums of paths by attention length and number of MLPs, and their algebra in frozen layers.

The paths that start at the input, and those that start at the memory of cross-attention, are
sums [a, m, n, d]; biases travel in an offset [n, d]. Every length has its slot from the start.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse import struct
from rank_collapse.network import streams
from rank_collapse.network.covers import FORWARD
from rank_collapse.network.residual import add_to_stream
from rank_collapse.network.walk import Algebra
from rank_collapse.paths.frozen import Frozen, carry_edit, connection, cross_attention


class Channels(struct.Struct):
    """Sums of paths so far."""

    start: Any  # [a, m, n, d], paths from the input
    memory: Any  # [a, m, n, d], paths from the memory; None without cross-attention
    offset: Any  # [n, d], what biases contributed
    # Bool [a], which lengths exist; traced, and not to be vmapped over. Others then cost nothing,
    # one program serves all layers, and lengths are moved one after the other. None for all of them
    # at once
    live: Any = None
    # Whether there are biases; False: the offset stays 0 and costs nothing. Static
    biased: bool = struct.field(pytree_node=False, default=True)

    def map(self, fn: Any, lengths: int | None = None, counts: int | None = None) -> "Channels":
        """fn(c [g, n, d], ones [g]) of all channels at once, or of the first slots of each axis."""
        groups = [g for g in (self.start, self.memory) if g is not None]
        groups = [g[:lengths, :counts] for g in groups]
        n, d = self.offset.shape
        if self.live is not None:
            return self._map_live(fn, groups)
        flat = jnp.concatenate([*(g.reshape(-1, n, d) for g in groups), self.offset[None]])
        ones = jnp.zeros(len(flat), flat.dtype).at[-1].set(1)
        out = fn(flat, ones)
        half = out[:-1].reshape(len(groups), *groups[0].shape)
        memory = None if self.memory is None else half[1]
        return self.replace(start=half[0], memory=memory, offset=out[-1])

    def _map_live(self, fn, groups):
        """`map`, length by length, of those that exist."""
        lengths, _, n, d = groups[0].shape
        slots = jnp.stack(groups, axis=1)  # [a, groups, m, n, d]

        def one(_, step):
            live, c = step
            flat = c.reshape(-1, n, d)
            zeros = jnp.zeros(len(flat), flat.dtype)
            moved = jax.lax.cond(live, lambda c: fn(c, zeros), lambda c: jnp.zeros_like(c), flat)
            return None, moved.reshape(c.shape)

        _, out = jax.lax.scan(one, None, (self.live[:lengths], slots))
        offset = self.offset
        if self.biased:
            offset = fn(offset[None], jnp.ones(1, offset.dtype))[0]
        memory = None if self.memory is None else out[:, 1]
        return self.replace(start=out[:, 0], memory=memory, offset=offset)

    def shift(self, axis: int | None) -> "Channels":
        """One empty slot put in front of a slot axis; None for no axis."""
        if axis is None:
            return self
        live = self.live
        if axis == 0 and live is not None:
            live = live.at[1:].max(live[:-1])
        before = (int(axis == 0), int(axis == 1))
        sizes = [s + b for s, b in zip(self.start.shape, before, strict=False)]
        start, memory = (pad_slots(group, sizes, before) for group in (self.start, self.memory))
        return self.replace(start=start, memory=memory, live=live)


def pad_slots(group: Any, sizes: Sequence[int], before: Sequence[int] = (0, 0)) -> Any:
    """Puts empty slots before and after those of a group [..., a, m, n, d]; None stays None."""
    if group is None:
        return None
    pads = [(b, s - b - t) for b, s, t in zip(before, sizes, group.shape[-4:], strict=False)]
    return jnp.pad(group, (*[(0, 0)] * (group.ndim - 4), *pads, (0, 0), (0, 0)))


class ByLength(Algebra):
    """Channels of paths through `Frozen` layers, whose constants are `Layer.extra`.

    Where MLPs are counted, their branches move a path along the second slot axis.
    """

    covers = dataclasses.replace(FORWARD, name="a sum of paths by length")

    def __init__(self, counted: bool = False):
        self.counted = counted

    def apply_norm(self, layer, spec, channels):
        return channels.map(lambda c, ones: Frozen(ones).apply_norm(layer, spec, c))

    def add_branch(self, layer, spec, channels, part):
        """Slot by slot."""
        own = connection(layer, spec)

        def total(c, p):
            return None if c is None else add_to_stream(spec, *streams.join_streams(own, c, p))

        return part.replace(
            start=total(channels.start, part.start),
            memory=total(channels.memory, part.memory),
            offset=total(channels.offset, part.offset),
        )

    def merge_streams(self, layer, spec, channels):
        own, names = connection(layer, spec), ("start", "memory", "offset")
        sums = {n: a for n in names if (a := getattr(channels, n)) is not None}
        return channels.replace(**{n: streams.merge_streams(own, a) for n, a in sums.items()})

    def edit_branch_input(self, layer, kind, branch_input):
        return self.edit_state(layer, f"{kind}_input", branch_input)

    def apply_attention(self, layer, branch_input):
        return self._further(Frozen.apply_attention, layer, branch_input, 0)

    def apply_cross(self, layer, branch_input):
        """Paths from the memory enter with length 1; biases join the offset."""
        memory = layer.inputs.memory
        own = jnp.stack([memory, jnp.zeros_like(memory)])
        ones = jnp.asarray([0, 1], own.dtype)
        part = cross_attention(layer, own, ones)
        entering, bias = carry_edit(layer, "cross_branch", part, ones)
        empty = jnp.zeros_like(branch_input.memory)
        part = branch_input.replace(start=empty, memory=empty.at[1, 0].set(entering), offset=bias)
        return part, None

    def apply_mlp(self, layer, branch_input):
        return self._further(Frozen.apply_mlp, layer, branch_input, 1 if self.counted else None)

    def edit_state(self, layer, name, channels):
        if name not in (layer.inputs.edit or ()):
            return channels
        struct.refuse_if(
            layer.config.streams and not name.endswith("_input"),
            f"{self.covers.name} does not cover an edit of {name!r} of streams",
        )
        return channels.map(lambda c, ones: carry_edit(layer, name, c, ones))

    def _further(self, branch, layer, branch_input, axis):
        """A branch whose paths are one further along a slot axis; the last slot is empty."""
        cut = [None if i != axis else -1 for i in range(2)]
        return branch_input.map(lambda c, ones: branch(Frozen(ones), layer, c)[0], *cut).shift(
            axis
        ), None
