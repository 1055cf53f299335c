"""All paths of each length, summed exactly in one pass together with the forward pass.

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
import numpy as np

from rank_collapse import struct
from rank_collapse.network import streams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import Covers
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.padding import cut_tokens, pad_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, WalkResult
from rank_collapse.network.precision import full_precision
from rank_collapse.network.residual import layer_gains
from rank_collapse.network.transformer import LayerValues, compute_layer
from rank_collapse.network.walk import Layer, apply_final_norm, walk_layer, walk_layers
from rank_collapse.paths.channels import ByLength, Channels, pad_slots
from rank_collapse.paths.frozen import freeze_final, freeze_layer


class PathContributions(struct.Struct):
    """The output of a network, split by the length of the paths that carry it.

    `by_length, offset = contributions` unpacks the two that sum to the output. Axes are counted
    from the last, so that leading ones may be added to all arrays: by `vmap`, by stacking, by
    `truncated` at several lengths, of the examples of `pretrained.stream`.

    Attributes:
        by_length: [L + 1, n, d] or, by attention length and number of MLPs, [L + 1, L + 1, n, d].
        offset: [n, d], what the biases contribute.
        from_memory: The part of by_length whose paths start at the memory; None without one.
        output: [n, d], the network's own output, from the same pass.
        count_mlps: Whether by_length has the axis of MLPs; static.
    """

    by_length: struct.Leaf
    offset: struct.Leaf
    from_memory: struct.Leaf | None = None
    output: struct.Leaf | None = None
    count_mlps: bool = struct.static(False)

    def __iter__(self):
        return iter((self.by_length, self.offset))

    @property
    def total(self) -> struct.Leaf:
        """Σ_k C_k + offset: the output, unless something was left out."""
        return self.by_attention_length.sum(axis=-3) + self.offset

    @property
    def by_attention_length(self) -> struct.Leaf:
        """[L + 1, n, d], summed over the number of MLPs where they are counted apart."""
        return self.by_length.sum(axis=-3) if self.count_mlps else self.by_length

    def up_to(self) -> struct.Leaf:
        """[L + 1, n, d]: the output of paths of lengths 0 .. k and the offset, for each k."""
        return jnp.cumsum(self.by_attention_length, axis=-3) + self.offset[..., None, :, :]

    def all_but(self) -> Any:
        """[L + 1, n, d]: the output without the paths of length k, for each k."""
        return self.total[..., None, :, :] - self.by_attention_length


@full_precision
def path_contributions(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    count_mlps: bool = False,
    head_gain: Any = None,
    attention_gain: Any = None,
    cross_gain: Any = None,
    mlp_gain: Any = None,
    pad_to: int | None = None,
    **inputs: Any,
) -> PathContributions:
    """Exact sums over all frozen paths of each length: Σ_k C_k + offset = output.

    Frozen: attention weights, norm statistics and MLP gates are those of the full forward pass.
    A path takes one head or the skip at each layer; its length counts the heads. A path from the
    memory begins with a head of a cross-attention, which counts too. MLPs are passed as a whole,
    skip and branch, unless `count_mlps` counts the branches.

    The gains here multiply branches and change nothing that is frozen: 0 leaves a branch out, and
    the derivative with respect to one is the sum of all paths through that branch.
    Differentiable; memory O(L n d), or O(L² n d) with `count_mlps`.

    Args:
        params, x, config: As in `apply`.
        count_mlps: Also split by the number of MLP branches on the path.
        head_gain: [L, h] multiplies self-attention heads, their value biases included.
        attention_gain, cross_gain, mlp_gain: [L] multiply branches, output bias included.
        pad_to: Number of tokens to which x is padded inside, so that inputs of several lengths
            share a program; see `pad_inputs` for what it takes.
        **inputs: mask, bias, memory, memory_mask, segments, positions and edit of `apply`. What an
            edit makes of scores and weights is frozen with them; of a state, every length passes
            its derivative and what is left joins the offset: a branch set to 0 leaves all lengths,
            a constant put in its place belongs to the offset.

    Returns:
        `PathContributions`, of the state after the final norm where the config has one.

    Raises:
        ValueError: As `apply`, or a gain of the wrong shape.

    Source: Theorem 2.1 of Dong et al. 2021, summed by length as in its section 2.1.
    """
    struct.refuse_if(
        isinstance(count_mlps, jax.core.Tracer),
        "count_mlps changes the result's shape and cannot be traced: "
        "jax.jit(path_contributions, static_argnames='count_mlps')",
    )
    num_tokens = np.shape(x)[0]
    if pad_to is not None:
        x, inputs = pad_inputs(x, pad_to, inputs)
    params, prepared = prepare_inputs(params, x, config, covers=ByLength.covers, **inputs)
    factors = {"attention": attention_gain, "cross": cross_gain, "mlp": mlp_gain}
    factors["head"] = head_gain
    found = _contributions(params, prepared, config, factors, count_mlps)
    axes = dict.fromkeys(("by_length", "offset", "from_memory", "output"), -2)
    return found if pad_to is None else cut_tokens(found, num_tokens, axes)


@functools.partial(jax.jit, static_argnames="count_mlps")
def _contributions(params, prepared, config, factors, count_mlps):
    lengths = LengthPass(count_mlps=count_mlps)
    gains = layer_gains(config, prepared.x.dtype, params)

    def step(layer, carry):
        state, channels = carry
        seen = compute_layer(layer, state)
        return (seen.state, lengths.carry_channels(layer, seen, channels, *layer.extra)), None

    # Recomputing a layer in the backward pass keeps gradients in O(L² n d).
    step = jax.checkpoint(step, prevent_cse=False)
    start = streams.start_streams(prepared.x, config), lengths.init_carry(prepared, config)
    extra = path_gains(config, gains, factors)
    (state, channels), _ = walk_layers(
        step, start, params, prepared, config, extra=extra, gains=gains
    )
    return lengths.build_result(WalkResult(params, state, channels, None, prepared, config))


@dataclasses.dataclass(frozen=True)
class LengthPass(LayerPass):
    """`path_contributions` layer by layer, in one program for all layers.

    All L + 1 lengths have their slots from the start, and the lengths that exist are moved one
    after the other: Σ_l (l + 1) uses of the value, output and MLP matrices, and no more memory
    than the channels and one branch of one length.
    """

    covers: ClassVar[Covers] = ByLength.covers
    biased: bool = True  # Whether the network has biases; False: no offset is carried
    count_mlps: bool = False  # Whether paths are counted apart by the MLP branches they pass

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Channels:
        """X^0 in the slot of length 0, and slots for the others."""
        x, most = streams.start_streams(prepared.x, config), config.depth + 1
        start = pad_slots(x[..., None, None, :, :], (most, most if self.count_mlps else 1))
        memory = jnp.zeros_like(start) if config.cross_attention else None
        return Channels(start, memory, jnp.zeros_like(x), biased=self.biased)

    def measure_layer(
        self, layer: Layer, x: Any, seen: Any, carry: Channels
    ) -> tuple[Channels, Any]:
        """The channels after the layer."""
        return self.carry_channels(layer, seen, carry), None

    def carry_channels(
        self,
        layer: Layer,
        seen: LayerValues,
        channels: Channels,
        head_gain: Any = None,
        gains: Any = None,
    ) -> Channels:
        """Carries channels through a layer whose constants are those of its own computation.

        Args:
            head_gain: [h], multiplies the heads of self-attention; None for 1.
            gains: Of the layer, with what multiplies its branches beyond the network's own gains.
        """
        constants = freeze_layer(layer, seen)
        if head_gain is not None:
            constants = constants.replace(head_gain=head_gain)
        live = jnp.arange(layer.config.depth + 1) <= layer.index
        layer = layer.replace(gains=layer.gains if gains is None else gains, extra=constants)
        channels, _ = walk_layer(ByLength(self.count_mlps), layer, channels.replace(live=live))
        return channels.replace(live=None)

    def build_result(self, walked: WalkResult) -> PathContributions:
        """The sums by length, the final norm frozen where there is one."""
        params, last, channels, _, prepared, config = walked
        extra = freeze_final(params, last, config)
        channels = apply_final_norm(ByLength(), channels, params, prepared, config, extra)
        sums, from_memory = channels.start, channels.memory
        if not self.count_mlps:
            sums, from_memory = jax.tree.map(lambda a: a[:, 0], (sums, from_memory))
        if from_memory is not None:
            sums = sums + from_memory
        return PathContributions(sums, channels.offset, from_memory, walked.output, self.count_mlps)


def path_gains(config, gains, factors):
    """(factors of heads [L, h] or None, gains with the factors [L] of each kind of branch)."""
    head_gain, branch = None, gains.branch
    for name, factor in factors.items():
        if factor is None:
            continue
        factor = jnp.asarray(factor, gains.temperature.dtype)
        shape = (config.depth, config.num_heads) if name == "head" else (config.depth,)
        struct.refuse(
            (factor.shape != shape, f"{name}_gain of shape {factor.shape} is not {shape}"),
            (
                name not in ("head", *config.kinds),
                f"{name}_gain is given but the network has no such branch",
            ),
        )
        if name == "head":
            head_gain = factor
            continue
        own = getattr(branch, name)
        factor = factor.reshape(-1, *[1] * (own.ndim - 1))
        branch = branch.replace(**{name: own * factor})
    return head_gain, gains.replace(branch=branch)
