"""Self-consistent truncation: the output of a network without paths longer than K.

Frozen sums keep the attention, norm statistics and gates of the full network, which includes long
paths. Here every sublayer computes them from the state of the paths of length at most K, so longer
paths have no influence at all.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse.annotations import ArrayLike, Leaf, Number, Tree
from rank_collapse.network import attention as attn, covers
from rank_collapse.network.attention_weights import attention_weights, mixing_matrix
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, WalkResult
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer, apply_final_norm, walk_layer, walk_network
from rank_collapse.paths.channels import ByLength, Channels, pad_slots
from rank_collapse.paths.contributions import PathContributions
from rank_collapse.paths.enumeration import check_lengths
from rank_collapse.paths.frozen import FrozenLayer, frozen_scale, mlp_gate


@full_precision
def truncated(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    length: Number,
    **inputs: ArrayLike | None,
) -> PathContributions:
    """Run the network with paths of length at most K, recomputing attention, norms and gates.

    With X = Σ_{k≤K} C_k + offset the state of every sublayer, P_h, 1/σ and the gates come from X:
        C_k ← λ C_k + γ Σ_h P_h(X) C_{k−1} W_h  for k ≤ K;  what would become longer is dropped.
    K = L is the full network, K = 0 the network whose heads pass on their biases alone. Short
    paths suffice where this is near the full network's output for a small K.

    Args:
        params, x, config: See `apply`.
        length: K, or several [k]; may be traced.
        **inputs: mask, bias, segments and positions of `apply`.

    Returns:
        `PathContributions` with by_length [L + 1, n, d], 0 beyond K, the offset and their sum as
        the output; with a leading axis [k] for several lengths. Memory O(L n d) for each.

    Raises:
        ValueError: In the same cases as `apply`; a length outside 0..L; cross-attention.
    """
    check_lengths(length, config.depth)
    length = jnp.asarray(length)
    if length.ndim > 1 or not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(
            f"length is {length.dtype} of shape {length.shape}, but must be an integer, or several "
            "in an array [k]"
        )
    params, prepared = prepare_inputs(params, x, config, covers=Truncated.covers, **inputs)
    return _run_truncated(params, prepared, config, length)


class Truncated(ByLength):
    """Channels of the lengths that exist, whose constants come from their own sum."""

    covers = covers.Covers("truncated", covers.all_fields_but(*covers.CROSS, "mix"))

    def __init__(self, length_exists: ArrayLike):
        super().__init__()
        self.length_exists = length_exists[:, None, None, None]  # Bool [a, 1, 1, 1]

    def apply_norm(self, layer, spec, channels):
        """Divide each channel by the σ that the norm computes for the sum of all channels."""
        scale = frozen_scale(sum_channels(channels), layer.config)
        extra = FrozenLayer({(spec.kind, spec.after_branch): scale})
        return super().apply_norm(layer.replace(extra=extra), spec, channels)

    def apply_attention(self, layer, branch_input):
        """Apply attention with the weights that the sum of the kept paths gives; longer paths are
        set to 0.

        Returns:
            (the channels, no further results: None).
        """
        x, params, context = sum_channels(branch_input), layer.params.attention, layer.context
        scores = attn.attention_scores(params, x, x, context=context, **layer.score_options)
        weights = attention_weights(scores, context, layer.config.normalise)
        weights = mixing_matrix(weights, layer.gains.mixing, context.mask)
        layer = layer.replace(extra=FrozenLayer(weights=weights))
        output, _ = super().apply_attention(layer, branch_input)
        return output.replace(start=jnp.where(self.length_exists, output.start, 0)), None

    def apply_mlp(self, layer, branch_input):
        """Apply the MLP with the gate that the sum of the kept paths gives."""
        gate = mlp_gate(layer.params.mlp, sum_channels(branch_input), layer.config)
        return super().apply_mlp(layer.replace(extra=FrozenLayer(gate=gate)), branch_input)


@jax.jit
def _run_truncated(params, prepared, config, length):
    """Pass the channels of lengths up to K through the network.

    Args:
        params, prepared: Parameters and inputs from `prepare_inputs`.
        config: The network.
        length: K, or several [k].
    """
    if length.ndim:
        return jax.vmap(functools.partial(_run_truncated, params, prepared, config))(length)
    algebra = Truncated(jnp.arange(config.depth + 1) <= length)
    channels = _start_channels(prepared.x, config.depth)
    channels = walk_network(algebra, channels, params, prepared, config)
    return PathContributions(channels.start[:, 0], channels.offset, output=sum_channels(channels))


@dataclasses.dataclass(frozen=True)
class TruncatedPass(LayerPass):
    """The output of `truncated` at one K, layer by layer: K + 1 channels instead of L + 1."""

    reads_layer_values: ClassVar[bool] = False
    covers: ClassVar = Truncated.covers
    length: int = 0  # K

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> Channels:
        """Put X^0 into the channel of length 0; what passes the last one is dropped."""
        return _start_channels(prepared.x, self.length)

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues | None, carry: Channels
    ) -> tuple[Channels, None]:
        """Pass the sums of short paths through the layer; nothing is measured by layer."""
        return walk_layer(self._algebra, layer, carry)[0], None

    def build_result(self, walk_result: WalkResult) -> Tree:
        """Return the output: the final norm of all sums of paths, added up."""
        channels = apply_final_norm(
            self._algebra,
            walk_result.carry,
            walk_result.params,
            walk_result.prepared,
            walk_result.config,
        )
        return sum_channels(channels)

    @property
    def _algebra(self):
        return Truncated(jnp.ones(self.length + 1, bool))


def _start_channels(x, max_length):
    """Put X^0 into the channel of length 0 of 0 .. max_length."""
    return Channels(pad_slots(x[None, None], (max_length + 1, 1)), None, jnp.zeros_like(x))


def sum_channels(channels: Channels) -> Leaf:
    """Sum channels and offset to tokens [n, d]."""
    return channels.start.sum(axis=(0, 1)) + channels.offset
