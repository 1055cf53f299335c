"""All paths of each length, summed exactly in one pass together with the forward pass.

With attention weights, norm statistics and MLP gates frozen every sublayer is affine. The (1+H)^L
paths then collect into one channel per length,
    C_k^l = λ C_k^{l−1} + γ Σ_h P_h^l C_{k−1}^{l−1} W_h^l,   C_0^0 = X.
Norms and MLPs are applied channel by channel; biases have a separate channel. The channels sum to
the output. Cost: about L/2 + 1 uses of the value, output and MLP matrices, not (1+H)^L.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Leaf, Number, Tree
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import Covers
from rank_collapse.network.input_checks import as_numbers
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, WalkResult
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import LayerValues, compute_layer
from rank_collapse.network.walk import Layer, apply_final_norm, walk_layer, walk_layers
from rank_collapse.paths.channels import ByLength, Channels, pad_slots
from rank_collapse.paths.frozen import freeze_final, freeze_layer


class PathContributions(struct.Struct):
    """The output of a network, split by the length of the paths that carry it.

    `by_length, offset = contributions` unpacks the two arrays that sum to the output. All arrays
    may have further leading axes: from `vmap`, from stacking, from `truncated` at several lengths,
    or from the examples of `pretrained.stream`.

    Attributes:
        by_length: [L + 1, n, d] or, by attention length and number of MLPs, [L + 1, L + 1, n, d].
        offset: [n, d], the contribution of the biases.
        from_memory: The part of by_length whose paths start at the memory; None without one.
        output: [n, d], the network's own output, from the same pass.
        count_mlps: Whether by_length has the axis of MLPs; static.
        longer: [n, d], the sum of all paths that are longer than those in by_length; None where it
            has all.
        num_state_axes: Axes of the output: 2 of [n, d]; static.
    """

    by_length: Leaf
    offset: Leaf
    from_memory: Leaf | None = None
    output: Leaf | None = None
    count_mlps: bool = struct.static(False)
    longer: Leaf | None = None
    num_state_axes: int = struct.static(2)

    def __iter__(self):
        return iter((self.by_length, self.offset))

    @property
    def total(self) -> Leaf:
        """Σ_k C_k + offset: the output, unless a gain of `path_contributions` removed a branch."""
        total = self.by_attention_length.sum(axis=self._length_axis) + self.offset
        return total if self.longer is None else total + self.longer

    @property
    def _length_axis(self) -> int:
        """Axis of the attention lengths in `by_attention_length`, before the axes of a state."""
        return -1 - self.num_state_axes

    @property
    def by_attention_length(self) -> Leaf:
        """[L + 1, n, d], summed over the number of MLPs where these are counted."""
        return self.by_length.sum(axis=self._length_axis) if self.count_mlps else self.by_length

    def up_to(self) -> Leaf:
        """Sum the paths of lengths 0 .. k and the offset, for each k: [L + 1, n, d]."""
        sums = jnp.cumsum(self.by_attention_length, axis=self._length_axis)
        return sums + jnp.expand_dims(self.offset, self._length_axis)

    def all_but(self) -> Leaf:
        """Sum everything but the paths of length k, for each k: [L + 1, n, d]."""
        return jnp.expand_dims(self.total, self._length_axis) - self.by_attention_length


@full_precision
def path_contributions(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    count_mlps: bool = False,
    head_gain: Number | None = None,
    **inputs: ArrayLike | None,
) -> PathContributions:
    """Sum all frozen paths of each length, exactly: Σ_k C_k + offset = output.

    Frozen: attention weights, norm statistics and MLP gates come from the full forward pass. A path
    takes one head or the skip at each layer; its length counts the heads. A path from the memory
    begins with a head of a cross-attention, which counts too. Paths pass MLPs as a whole, skip and
    branch, unless `count_mlps` counts the branches.

    A frozen path is a term of the output, not a network: the attention of later layers has already
    seen all other paths. `truncated` computes the output of a network of short paths alone, and
    `path_state` a single path with attention from its own state.

    `head_gain` multiplies heads and does not change the frozen values. 0 leaves a head out, and the
    derivative with respect to a gain is the sum of all paths through that head. Differentiable;
    memory O(L n d), or O(L² n d) with `count_mlps`.

    Args:
        params, x, config: See `apply`.
        count_mlps: Whether to split also by the number of MLP branches on the path.
        head_gain: [L, h] multiplies self-attention heads, their value biases included.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`. What an
            edit makes of scores and weights is frozen with them; of a state, every length passes
            its derivative, and its constant part joins the offset: a branch set to 0 leaves all
            lengths, a constant put in its place belongs to the offset.

    Returns:
        `PathContributions`, of the state after the final norm where the config has one.

    Raises:
        ValueError: In the same cases as `apply`, or a gain of the wrong shape.

    Source: Theorem 2.1 of Dong et al. 2021, summed by length as in its section 2.1.
    """
    if isinstance(count_mlps, jax.core.Tracer):
        raise ValueError(
            "count_mlps cannot be traced, because it changes the shape of the result; use "
            "jax.jit(path_contributions, static_argnames='count_mlps')"
        )
    params, prepared = prepare_inputs(params, x, config, covers=ByLength.covers, **inputs)
    if head_gain is not None:
        head_gain = as_numbers(head_gain, "head_gain", prepared.x.dtype)
        if head_gain.shape != (config.depth, config.num_heads):
            raise ValueError(
                f"head_gain has the shape {head_gain.shape}, but must have the shape (depth, "
                f"num_heads) = {(config.depth, config.num_heads)}"
            )
    return _contributions(params, prepared, config, head_gain, count_mlps)


@functools.partial(jax.jit, static_argnames="count_mlps")
def _contributions(params, prepared, config, head_gain, count_mlps):
    """Carry the channels through the layers together with the forward pass.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        head_gain, count_mlps: See `path_contributions`.
    """
    lengths = LengthPass(count_mlps=count_mlps)

    def step(layer, state):
        """Pass a layer: ((state, channels of its paths), no result of the layer: None)."""
        x, channels = state
        layer_values = compute_layer(layer, x)
        channels = lengths.carry_channels(layer, layer_values, channels, layer.extra)
        return (layer_values.trace.hidden, channels), None

    # Recomputing a layer in the backward pass keeps gradients in O(L² n d).
    step = jax.checkpoint(step, prevent_cse=False)
    start = prepared.x, lengths.init_carry(prepared, config)
    (last_state, channels), _ = walk_layers(step, start, params, prepared, config, extra=head_gain)
    return lengths.build_result(WalkResult(params, last_state, channels, None, prepared, config))


@dataclasses.dataclass(frozen=True)
class LengthPass(LayerPass):
    """`path_contributions` layer by layer, in one program for all layers.

    All L + 1 lengths have their slots from the start. The lengths that exist are passed one after
    the other: this takes Σ_l (l + 1) uses of the value, output and MLP matrices, and only the
    memory of the channels and of one branch of one length.
    """

    covers: ClassVar[Covers] = ByLength.covers
    biased: bool = True  # whether the network has biases; False: no offset is carried
    count_mlps: bool = False  # whether paths are counted apart by the MLP branches they pass

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Channels:
        """Make the sums over paths before the first layer: the input is the path of length 0,
        others are 0."""
        x, num_slots = prepared.x, config.depth + 1
        sizes = (num_slots, num_slots if self.count_mlps else 1)
        start = pad_slots(x[..., None, None, :, :], sizes)
        memory = jnp.zeros_like(start) if config.cross_attention else None
        return Channels(start, memory, jnp.zeros_like(x), biased=self.biased)

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Channels
    ) -> tuple[Channels, Tree]:
        """Pass the sums of paths through the layer, frozen at its values; nothing is measured by
        layer."""
        return self.carry_channels(layer, layer_values, carry), None

    def carry_channels(
        self,
        layer: Layer,
        layer_values: LayerValues,
        channels: Channels,
        head_gain: Number | None = None,
    ) -> Channels:
        """Carry channels through a layer, with the constants of its forward pass.

        Args:
            layer: The layer.
            layer_values: Values of the layer in the forward pass.
            channels: Channels before the layer.
            head_gain: [h], multiplies the heads of self-attention; None for 1.
        """
        constants = freeze_layer(layer, layer_values)
        if head_gain is not None:
            constants = constants.replace(head_gain=head_gain)
        live = jnp.arange(layer.config.depth + 1) <= layer.index
        layer, channels = layer.replace(extra=constants), channels.replace(live=live)
        channels, _ = walk_layer(ByLength(self.count_mlps), layer, channels)
        return channels.replace(live=None)

    def build_result(self, walk_result: WalkResult) -> PathContributions:
        """Return the sums by length, after the frozen final norm where there is one."""
        params, last_state, channels, _, prepared, config = walk_result
        extra = freeze_final(last_state, config)
        channels = apply_final_norm(ByLength(), channels, params, prepared, config, extra)
        sums, from_memory = channels.start, channels.memory
        if not self.count_mlps:
            sums, from_memory = jax.tree.map(lambda a: a[:, 0], (sums, from_memory))
        if from_memory is not None:
            sums = sums + from_memory
        return PathContributions(
            sums, channels.offset, from_memory, walk_result.output, self.count_mlps
        )
