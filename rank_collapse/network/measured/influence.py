"""How much each layer changes the hidden states, and how the output changes without layers.

Axis letters: n tokens, d width, l layers, s removed layers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.checks import check_whole
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, States, WalkResult, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.residual import scale_summands
from rank_collapse.network.transformer import LayerValues, compute_layer
from rank_collapse.network.walk import Layer, SublayerValues


@full_precision
def layer_influence(
    params: TransformerParams, x: ArrayLike, config: TransformerConfig, **inputs: ArrayLike | None
) -> dict[str, Float[Array, "..."]]:
    """Measure how much each layer changes the residual stream, means over the tokens that exist.

    block_influence   1 − cos(X^l_i, X^{l+1}_i), [L] (Men et al. 2024, ShortGPT, equation 1). Where
                      a token is 0 that divides 0 by 0. Here, and in the angle, such a token is at
                      right angles to others, as in torch.nn.functional.cosine_similarity, and at
                      angle 0 to itself
    angle             arccos(cos(X^l_i, X^m_i))/π of every two layers, [L + 1, L + 1]: 0 the same
                      direction, 1/2 at right angles (the figure of Sun et al. 2025, The Curse of
                      Depth)
    last_angle        the same of the last token that exists alone, which sees all others under a
                      causal mask (Gromov et al. 2024)
    attention_ratio   ‖γ N'(SA)_i‖/‖λ X^l_i‖, [L], what the branch adds over the stream it joins:
                      with gains, LayerScale and the branch's norm, before the norm of the sum;
                      over X^l itself where there is no skip
    mlp_ratio         the same of the MLP, [L], the stream after attention; without MLP absent
                      (both: Csordás et al. 2025, relative norms of the contributions)
    attention_share   ‖a_i‖/(‖x_i‖ + ‖a_i‖) of the same two vectors, [L]; 1 without a skip
                      (arXiv 2602.16837): `rc.path_length_law` of it is the rollout's path length
    attention_cosine  cos of the same two vectors, [L]: below 0 the branch removes what the stream
                      holds, near 0 it writes something new, above 0 it amplifies
    mlp_cosine        the same of the MLP, [L]
    layer_cosine      cos(X^{l+1}_i − X^l_i, X^l_i), [L] (the three: Csordás et al. 2025)
    stream            ‖X^l_i‖, [L + 1]

    Args:
        params, x, config, **inputs: See `rc.apply`; a mask [n] marks the tokens that exist.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run_pass(InfluencePass(), params, prepared, config)


@full_precision
def layer_removal(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    size: int = 1,
    spare: int = 0,
    **inputs: ArrayLike | None,
) -> dict[str, Float[Array, "..."]]:
    """Measure how the output changes without each layer: the network runs again without layer s.

    later       [L, L], row s: ‖Δ_l(without s) − Δ_l‖_F/‖Δ_l‖_F with Δ_l = X^{l+1} − X^l, how much
                later layers l > s depend on layer s; 0 for l ≤ s
    later_most  [L, L], the largest over tokens i of ‖Δ_li(without s) − Δ_li‖/‖Δ_li‖; with spare=1
                that of Csordás et al. 2025, whose code keeps the first token's layer
    cosine      [L], mean over tokens of cos(Y_i, Y_i without s), Y the output
    error       [L], ‖Y − Y without s‖_F/‖Y‖_F
    output      [n, d], Y
    outputs     [L, n, d], Y without s, for a read-out (ShortGPT's removal: loss without the layer)

    Cost: L/2 forward passes.

    Args:
        params, x, config, **inputs: See `rc.apply`; a mask [n] marks the tokens that exist.
        size: Adjacent layers that are removed together, s to s + size − 1 (Gromov et al. 2024);
            the leading axes are then of L − size + 1 blocks.
        spare: Number of first tokens whose states stay those of the full network after the removed
            layers. Otherwise an attention sink is lost with the layer that writes it.

    Raises:
        ValueError: A size that is not between 1 and L.
    """
    spare = check_whole("spare", spare, 0)
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run_pass(RemovalPass(size, spare), params, prepared, config)


def find_settling_index(is_enough: Any) -> Int[Array, "*s"]:
    """Find the smallest k such that `is_enough` [..., k] holds for k and all larger ones.

    For sums of paths of lengths up to k it may be "the same next token on 99 % of positions" or "a
    loss within 1 %"; the last entry, the full network, is enough by definition.

    Args:
        is_enough: Bool; the last axis is k.
    """
    is_enough = jnp.asarray(is_enough).at[..., -1].set(True)
    holds_from_here = jnp.cumprod(is_enough[..., ::-1], axis=-1)[..., ::-1]
    return jnp.sum(holds_from_here == 0, axis=-1)


def branch_share(values: SublayerValues) -> Float[Array, "n"]:
    """Compute each token's ‖a_i‖/(‖x_i‖ + ‖a_i‖), the share of a branch in the sum it joins.

    x is the stream with the skip's gain, a the branch with its gain and its own norm. The share is
    1 without a skip, and 0 where both are 0.

    Args:
        values: Values of the sublayer.
    """
    stream, branch = scale_summands(values.spec, values.state, values.branch_output)
    branch_length = jnp.linalg.norm(branch, axis=-1)
    total = branch_length + (jnp.linalg.norm(stream, axis=-1) if values.spec.skip else 0.0)
    return jnp.where(total == 0, 0.0, branch_length / jnp.where(total == 0, 1.0, total))


def attention_share(layer: Layer, x: Array, layer_values: LayerValues) -> Float[Array, ""]:
    """Measure the mean `branch_share` of a layer's attention over the tokens that exist."""
    share = branch_share(layer_values.sublayers["attention"])
    return _mean_over_tokens(share, layer.inputs.token_mask)


@dataclasses.dataclass(frozen=True)
class InfluencePass(States):
    """`layer_influence` layer by layer, which needs the states of all layers at the end."""

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Measure how large a layer's branches are, and keep the state after the layer.

        Returns:
            (the carry, (the state [n, d], measures as means over tokens: the norm of each branch
                over that of the stream to which it is added, and the cosine of the two)).
        """
        mask = layer.inputs.token_mask
        measures = {"attention_share": attention_share(layer, x, layer_values)}
        for kind, values in layer_values.sublayers.items():
            if kind != "cross":
                stream, branch = scale_summands(values.spec, values.state, values.branch_output)
                length = jnp.linalg.norm(stream, axis=-1)
                ratio = jnp.linalg.norm(branch, axis=-1) / jnp.where(length == 0, 1, length)
                measures[f"{kind}_ratio"] = _mean_over_tokens(ratio, mask)
                measures[f"{kind}_cosine"] = _mean_over_tokens(_cosine(branch, stream), mask)
        return carry, (layer_values.trace.hidden, measures)

    def build_result(self, walk_result: WalkResult) -> dict[str, Float[Array, "..."]]:
        """Add to the measures of the layers those that compare the states X^0 .. X^L of all
        layers.

        They are means over tokens that exist: "layer_cosine" of a layer's change and the state
        before it [L]; "block_influence", 1 − cosine of the states before and after a layer [L];
        "angle" between each two states, in units of π [L + 1, L + 1]; "stream", the norm of the
        states [L + 1]. "last_angle" is the angle of the last token alone.
        """
        (states, layer_measures), mask = walk_result.layer_results, walk_result.prepared.token_mask
        states = super().build_result(walk_result._replace(layer_results=states))
        length = jnp.linalg.norm(states, axis=-1, keepdims=True)
        unit = states / jnp.where(length == 0, 1, length)

        def half_angle(u, v):
            """Compute half the angle of unit vectors by Kahan's formula: arccos loses half the
            digits where directions are nearly equal."""
            return jnp.arctan2(jnp.linalg.norm(u - v, axis=-1), jnp.linalg.norm(u + v, axis=-1))

        half_angles = jax.lax.map(lambda u: half_angle(unit, u[None]), unit)
        sines = jnp.sin(half_angle(unit[1:], unit[:-1]))
        last_token = -1 if mask is None else jnp.max(jnp.arange(len(mask)) * mask)
        layer_cosines = _cosine(states[1:] - states[:-1], states[:-1])
        return layer_measures | {
            "layer_cosine": _mean_over_tokens(layer_cosines, mask),
            "block_influence": _mean_over_tokens(2 * jnp.square(sines), mask),
            "angle": _mean_over_tokens(half_angles, mask) / (jnp.pi / 2),
            "last_angle": half_angles[..., last_token] / (jnp.pi / 2),
            "stream": _mean_over_tokens(length[..., 0], mask),
        }


@dataclasses.dataclass(frozen=True)
class RemovalPass(LayerPass):
    """`layer_removal` layer by layer, which carries the states of networks without a block.

    Slot s holds the network without the block that begins with layer s. It exists from that layer
    on; empty slots cost nothing.
    """

    size: int = 1  # layers of a block
    spare: int = 0  # first tokens that keep the states of the full network

    def init_carry(
        self, prepared: PreparedInputs, config: TransformerConfig
    ) -> Float[Array, "s n d"]:
        """Make the states of the networks without a block, all 0 until their block begins: [s, n,
        d].

        Raises:
            ValueError: A block of 0 layers, or of more layers than there are.
        """
        check_whole("size", self.size, 1, config.depth)
        return jnp.zeros((config.depth - self.size + 1, *prepared.x.shape), prepared.x.dtype)

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues, carry: Tree
    ) -> tuple[Any, Float[Array, "s 2"]]:
        """Apply the layer in every network that has it, and compare its change with the change in
        the full network.

        Returns:
            The states of all slots; and for each the relative difference of the layer's change,
            over all tokens and the largest of one token.
        """
        mask = layer.inputs.token_mask
        full_state = layer_values.trace.hidden
        change = zero_padding(full_state - x, mask)
        exists = layer.inputs.existing_tokens
        is_spared = exists & (jnp.cumsum(exists) <= self.spare)

        def apply_layer(x):
            """Apply the layer in one network without a block, and compare its change with the
            full network's.

            Returns:
                (state after the layer, relative difference of its change, the largest difference of
                a token).
            """
            state = compute_layer(layer, x).trace.hidden
            difference = zero_padding(state - x, mask) - change
            length = jnp.linalg.norm(change, axis=-1)
            by_token = jnp.linalg.norm(difference, axis=-1) / jnp.where(length == 0, 1, length)
            total = jnp.linalg.norm(difference) / jnp.linalg.norm(change)
            return state, total, jnp.max(by_token)

        def advance_slot(_, slot):
            """Advance the network of one slot by this layer.

            Before its removed block the slot has no state. At the block's first layer it takes the
            state of the full network, inside the block it keeps it (spared tokens follow the full
            network), and behind it the layer is applied.

            Returns:
                No carry, None, and (state of the slot, its two differences; 0 inside the removed
                block).
            """
            first_removed, slot_state = slot
            is_behind = layer.index >= first_removed + self.size
            is_first = layer.index == first_removed
            zero = jnp.zeros((), slot_state.dtype)
            state, total, largest = jax.lax.cond(
                is_behind, apply_layer, lambda state: (state, zero, zero), slot_state
            )
            state = jnp.where(is_first, x, state)
            is_inside = (layer.index >= first_removed) & ~is_behind
            state = jnp.where(is_spared[:, None] & is_inside, full_state, state)
            return None, (state, jnp.stack([total, largest]))

        _, (carry, differences) = jax.lax.scan(advance_slot, None, (jnp.arange(len(carry)), carry))
        return carry, differences

    def build_result(self, walk_result: WalkResult) -> dict[str, Float[Array, "..."]]:
        """Compare the outputs without each layer with the output of the full model."""
        output, mask = walk_result.output, walk_result.prepared.token_mask
        outputs = jax.vmap(lambda x: walk_result._replace(last_state=x).output)(walk_result.carry)
        full, without = zero_padding(output, mask), zero_padding(outputs, mask)
        errors = jnp.linalg.norm(without - full[None], axis=(-2, -1))
        return {
            "later": walk_result.layer_results[..., 0].T,
            "later_most": walk_result.layer_results[..., 1].T,
            "cosine": mean_cosine(without, full, mask),
            "error": errors / jnp.linalg.norm(full),
            "output": output,
            "outputs": outputs,
        }


def zero_padding(a: Float[Array, "*s n d"], mask: ArrayLike) -> Float[Array, "*s n d"]:
    """Set tokens that do not exist to zero; the mask is Bool [n], or None for all.

    Args:
        a: Tokens.
        mask: Bool [n], True for tokens that exist; None for all.
    """
    return a if mask is None else jnp.where(mask.reshape((1,) * (a.ndim - 2) + (-1, 1)), a, 0)


def mean_cosine(
    a: Float[Array, "k n d"], b: Float[Array, "n d"], mask: ArrayLike
) -> Float[Array, "k"]:
    """Average cos(a_i, b_i) over the tokens i that exist; it is 0 where one of them is 0.

    Args:
        a, b: Tokens; b is compared with every row of a.
        mask: Bool [n], True for tokens that exist; None for all.
    """
    return _mean_over_tokens(_cosine(a, b[None]), mask)


def _cosine(a, b):
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.where(lengths == 0, 1, lengths)


def _mean_over_tokens(values, mask):
    """Average over the last axis, the tokens that exist."""
    if mask is None:
        return jnp.mean(values, axis=-1)
    mask = mask.reshape((1,) * (values.ndim - 1) + (-1,))
    return jnp.sum(jnp.where(mask, values, 0), axis=-1) / jnp.sum(mask, dtype=values.dtype)
