"""Sums of paths by attention length and number of MLPs, and their algebra in frozen layers.

The paths that start at the input, and those that start at the memory of cross-attention, are
sums [a, m, n, d]; biases travel in an offset [n, d]. Every length has its slot from the start.

Axis letters: a attention lengths, m numbers of MLPs, g channels, n tokens, d width.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from rank_collapse import struct
from rank_collapse.annotations import Leaf, Tree
from rank_collapse.network.covers import EVERYTHING
from rank_collapse.network.residual import add_to_stream
from rank_collapse.network.walk import Algebra
from rank_collapse.paths.frozen import Frozen, attend_channels, carry_edit


class Channels(struct.Struct):
    """Sums of paths so far."""

    start: Leaf  # [a, m, n, d], paths from the input
    memory: Leaf  # [a, m, n, d], paths from the memory; None without cross-attention
    offset: Leaf  # [n, d], what biases contributed
    # Bool [a], which lengths exist; traced, and not to be vmapped over. Lengths are then passed one
    # after the other, those that do not exist cost nothing, and one program serves all layers. None
    # to pass all lengths at once
    live: Tree = None
    # Whether there are biases; False: the offset stays 0 and costs nothing. Static
    biased: bool = struct.field(pytree_node=False, default=True)

    def apply_to_all(
        self, fn: Callable, num_lengths: int | None = None, num_counts: int | None = None
    ) -> "Channels":
        """Apply fn(c [g, n, d], ones [g]) to all channels.

        Args:
            fn: Function of a channel c and of `ones`, which is 1 for the channel of the offset and
                0 for others.
            num_lengths, num_counts: Number of first slots to use on each axis; None for all.
        """
        groups = [g for g in (self.start, self.memory) if g is not None]
        groups = [g[:num_lengths, :num_counts] for g in groups]
        if self.live is not None:
            return self._apply_to_live(fn, groups)
        n, d = self.offset.shape
        flat = jnp.concatenate([*(g.reshape(-1, n, d) for g in groups), self.offset[None]])
        ones = jnp.zeros(len(flat), flat.dtype).at[-1].set(1)
        out = fn(flat, ones)
        sums = out[:-1].reshape(len(groups), *groups[0].shape)
        memory = None if self.memory is None else sums[1]
        return self.replace(start=sums[0], memory=memory, offset=out[-1])

    def _apply_to_live(self, fn, groups):
        """Apply fn to the sums of lengths that exist, one after the other; the other lengths stay
        0.

        A length exists in a layer if a path can have it there. fn is linear except for biases, so
        it is applied to the offset, which holds all biases, apart from the others.

        Args:
            fn: See `apply_to_all`.
            groups: Paths from the input, and those from the memory, [a, m, n, d] each: attention
                lengths, numbers of MLPs, tokens, width.
        """
        num_lengths, _, n, d = groups[0].shape
        slots = jnp.stack(groups, axis=1)  # [a, groups, m, n, d]

        def apply_to_length(_, slot):
            """Apply fn to one length if it exists; other lengths stay 0.

            Returns:
                No carry, None, and the channels of the length.
            """
            is_live, c = slot
            flat = c.reshape(-1, n, d)
            zeros = jnp.zeros(len(flat), flat.dtype)
            out = jax.lax.cond(is_live, lambda c: fn(c, zeros), lambda c: jnp.zeros_like(c), flat)
            return None, out.reshape(c.shape)

        _, out = jax.lax.scan(apply_to_length, None, (self.live[:num_lengths], slots))
        offset = self.offset
        if self.biased:
            offset = fn(offset[None], jnp.ones(1, offset.dtype))[0]
        memory = None if self.memory is None else out[:, 1]
        return self.replace(start=out[:, 0], memory=memory, offset=offset)

    def shift(self, axis: int) -> "Channels":
        """Move all sums to paths of one length more: put one empty slot in front of an axis.

        Args:
            axis: 0 for attention lengths, 1 for numbers of MLPs.
        """
        live = self.live
        if axis == 0 and live is not None:
            live = live.at[1:].max(live[:-1])
        before = (1, 0) if axis == 0 else (0, 1)
        num_lengths, num_counts = self.start.shape[:2]
        sizes = (num_lengths + before[0], num_counts + before[1])
        return self.replace(
            start=pad_slots(self.start, sizes, before),
            memory=pad_slots(self.memory, sizes, before),
            live=live,
        )


def pad_slots(group: Tree, sizes: Sequence[int], before: Sequence[int] = (0, 0)) -> Leaf | None:
    """Pad sums over paths with 0 for further lengths; None stays None.

    Args:
        group: Sums [..., a, m, n, d] by attention length and number of MLPs.
        sizes: Sizes of these two axes afterwards.
        before: Number of the new entries that are put in front.
    """
    if group is None:
        return None
    pads = [(0, 0)] * group.ndim
    for axis, size, num_before in zip((-4, -3), sizes, before, strict=True):
        pads[axis] = (num_before, size - num_before - group.shape[axis])
    return jnp.pad(group, pads)


class ByLength(Algebra):
    """Channels of paths through `Frozen` layers, whose constants are `Layer.extra`.

    Where MLPs are counted, their branches move a path along the second slot axis.
    """

    covers = dataclasses.replace(EVERYTHING, name="a sum of paths by length")

    def __init__(self, counts_mlps: bool = False):
        self.counts_mlps = counts_mlps

    def apply_norm(self, layer, spec, channels):
        """Apply the frozen norm, which is affine, to each sum of paths; its bias goes to the
        offset."""
        return channels.apply_to_all(lambda c, ones: Frozen(ones).apply_norm(layer, spec, c))

    def add_branch(self, layer, spec, channels, branch_output):
        """Add a branch to each sum of paths."""

        def add(c, branch):
            return add_to_stream(spec, c, branch)

        live = branch_output.live
        total = jax.tree.map(add, channels.replace(live=None), branch_output.replace(live=None))
        return total.replace(live=live)

    def edit_branch_input(self, layer, kind, branch_input):
        """Apply the caller's edit of what a branch reads to each sum of paths, if there is one."""
        return self.edit_state(layer, f"{kind}_input", branch_input)

    def edit_state(self, layer, name, channels):
        """Apply the caller's edit of a value to each sum of paths; without such an edit they
        stay."""
        if name not in (layer.inputs.edit or ()):
            return channels
        return channels.apply_to_all(lambda c, ones: carry_edit(layer, name, c, ones))

    def apply_attention(self, layer, branch_input):
        """Pass every channel through the frozen heads, to the slot of one length more.

        The last slot was empty: no path is longer than the number of layers.
        """

        def attend(c, ones):
            return Frozen(ones).apply_attention(layer, c)[0]

        return branch_input.apply_to_all(attend, num_lengths=-1).shift(0), None

    def apply_cross(self, layer, branch_input):
        """Attend to the memory: its tokens begin new paths, of length 1, and biases join the
        offset.

        The queries only decide the frozen weights, so no path from the input passes this branch.

        Returns:
            (the channels, no further results: None).
        """
        memory = layer.inputs.memory
        ones = jnp.asarray([0, 1], memory.dtype)
        output = attend_channels(layer, "cross", jnp.stack([memory, jnp.zeros_like(memory)]), ones)
        from_memory, bias = carry_edit(layer, "cross_branch", output, ones)
        empty = jnp.zeros_like(branch_input.memory)
        with_entering = empty.at[1, 0].set(from_memory)
        return branch_input.replace(start=empty, memory=with_entering, offset=bias), None

    def apply_mlp(self, layer, branch_input):
        """Pass every channel through the frozen MLP.

        Where MLPs are counted, paths move to the slot of one MLP more; the last slot was empty.

        Returns:
            (the channels, no further results: None).
        """

        def pass_mlp(c, ones):
            return Frozen(ones).apply_mlp(layer, c)[0]

        if self.counts_mlps:
            return branch_input.apply_to_all(pass_mlp, num_counts=-1).shift(1), None
        return branch_input.apply_to_all(pass_mlp), None
