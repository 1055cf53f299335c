"""How much each layer changes the hidden states, and how the output changes without layers.

Axis letters: n tokens, d width, l layers, s layers that are skipped.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse.measures.arrays import as_array
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import EVERYTHING, Covers
from rank_collapse.network.inputs import PreparedInputs, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, States, WalkResult, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.residual import ResidualSpec, scale_summands
from rank_collapse.network.transformer import compute_layer
from rank_collapse.network.walk import Layer


@full_precision
def layer_influence(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> dict[str, Float[Array, "..."]]:
    """How much each layer changes the residual stream, means over the tokens i that exist.

    block_influence   1 − cos(X^l_i, X^{l+1}_i), [L] (Men et al. 2024, ShortGPT, equation 1, which
                      divides 0 by 0 where a token is 0. Here, and in the angle, such a token is at
                      right angles to others, as torch.nn.functional.cosine_similarity has it, and
                      at none to itself)
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
        params, x, config, **inputs: As in `rc.apply`; a mask [n] says which tokens exist.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run_pass(InfluencePass(), params, prepared, config)


@full_precision
def layer_removal(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    size: int = 1,
    spare: int = 0,
    **inputs: Any,
) -> dict[str, Float[Array, "..."]]:
    """How the output changes without each layer: the network runs again without layer s.

    later       [L, L], row s: ‖Δ_l(without s) − Δ_l‖_F/‖Δ_l‖_F with Δ_l = X^{l+1} − X^l, how much
                later layers l > s depend on layer s; 0 for l ≤ s
    later_most  [L, L], the largest over tokens i of ‖Δ_li(without s) − Δ_li‖/‖Δ_li‖; with spare=1
                that of Csordás et al. 2025, whose code leaves the first token its layer
    cosine      [L], mean over tokens of cos(Y_i, Y_i without s), Y the output
    error       [L], ‖Y − Y without s‖_F/‖Y‖_F
    output      [n, d], Y
    outputs     [L, n, d], Y without s, for a read-out (ShortGPT's removal: loss without the layer)

    Cost: L/2 forward passes.

    Args:
        params, x, config, **inputs: As in `rc.apply`; a mask [n] says which tokens exist.
        size: Adjacent layers that are removed together, s to s + size − 1 (Gromov et al. 2024);
            the leading axes are then of L − size + 1 blocks.
        spare: First tokens whose states stay those of the whole network after the layers that are
            removed. Without the layer that writes it, a sink of attention is lost with its layer.

    Raises:
        ValueError: A size that is not between 1 and L.
    """
    params, prepared = prepare_inputs(params, x, config, **inputs)
    return run_pass(RemovalPass(size, spare), params, prepared, config)


def effective_depth(states: Any, tolerance: float = 0.01) -> Int[Array, ""]:
    """Layers, or loops of one layer, after which a network's states stay as the last.

    The smallest l with ‖X^m − X^L‖_F ≤ ε max_k ‖X^k‖_F for all m ≥ l; L where the last layer still
    changes them, or a state is not finite.

    Args:
        states: [L + 1, ...], such as `Trace.hidden`, or what is measured of each, such as
            `rc.residual_ratio`; every k-th where k layers are one loop.
        tolerance: ε.

    Source: here, for networks that loop one layer, such as ALBERT (Lan et al. 2020).
    """
    states = jnp.asarray(as_array(states))
    flat = states.reshape(len(states), -1)
    largest = jnp.max(jnp.abs(flat))
    flat = flat / jnp.where(largest == 0, 1, largest)  # NaN of inf, and no square overflows
    size = jnp.max(jnp.linalg.norm(flat, axis=1))
    return find_settling_index(jnp.linalg.norm(flat - flat[-1:], axis=1) <= tolerance * size)


def find_settling_index(enough: Any) -> Int[Array, "*s"]:
    """The smallest k such that `enough` holds for k and all larger ones: Bool [k] or [..., k].

    Of sums of paths of lengths up to k, `enough` may be "the same next token on 99 % of positions"
    or "a loss within 1 %"; the last entry, the whole network, is enough by itself.
    """
    enough = jnp.asarray(enough).at[..., -1].set(True)
    return jnp.sum(jnp.cumprod(enough[..., ::-1], axis=-1)[..., ::-1] == 0, axis=-1)


def branch_share(
    spec: ResidualSpec, stream: Float[Array, "n d"], branch: Float[Array, "n d"]
) -> Float[Array, "n"]:
    """Compute each token's ‖a_i‖/(‖x_i‖ + ‖a_i‖), the share of a branch in the sum it joins.

    x is the stream with the skip's gain, a the branch with its gain and its own norm. The share is
    1 without a skip, and 0 where both are 0.

    Args:
        spec: Of the sublayer.
        stream: The stream before it.
        branch: The branch's output, as a trace has it.
    """
    stream, branch = scale_summands(spec, stream, branch)
    added = jnp.linalg.norm(branch, axis=-1)
    total = added + (jnp.linalg.norm(stream, axis=-1) if spec.skip else 0.0)
    return jnp.where(total == 0, 0.0, added / jnp.where(total == 0, 1.0, total))


def attention_share(layer: Layer, x: Any, seen: Any) -> Float[Array, ""]:
    """Measure the mean `branch_share` of a layer's attention over the tokens that exist."""
    sublayer = seen.sublayers["attention"]
    share = branch_share(sublayer.spec, sublayer.state, sublayer.branch_output)
    return _mean(share, layer.inputs.token_mask)


@dataclasses.dataclass(frozen=True)
class InfluencePass(States):
    """`layer_influence` layer by layer, which keeps the states of all layers."""

    covers: ClassVar[Covers] = EVERYTHING

    def measure_layer(self, layer: Layer, x: Any, seen: Any, carry: Any) -> tuple[Any, Any]:
        """The state after the layer, and its ratios."""
        mask = layer.inputs.token_mask
        measures = {"attention_share": attention_share(layer, x, seen)}
        for kind, p in seen.sublayers.items():
            if kind != "cross":
                stream, part = scale_summands(p.spec, p.state, p.branch_output)
                measures[f"{kind}_ratio"] = _mean_ratio(stream, part, mask)
                measures[f"{kind}_cosine"] = _mean(_cosine(part, stream), mask)
        return carry, (seen.trace.hidden, measures)

    def build_result(self, walked: WalkResult) -> dict[str, Float[Array, "..."]]:
        """The measures by name."""
        (states, by_layer), mask = walked.layer_results, walked.prepared.token_mask
        states = super().build_result(walked._replace(layer_results=states))
        length = jnp.linalg.norm(states, axis=-1, keepdims=True)
        unit = states / jnp.where(length == 0, 1, length)

        def half_angle(u, v):
            """Kahan's: arccos loses half the digits where directions are nearly equal."""
            return jnp.arctan2(jnp.linalg.norm(u - v, axis=-1), jnp.linalg.norm(u + v, axis=-1))

        halves = jax.lax.map(lambda u: half_angle(unit, u[None]), unit)
        turned = jnp.sin(half_angle(unit[1:], unit[:-1]))
        return by_layer | {
            "layer_cosine": _mean(_cosine(states[1:] - states[:-1], states[:-1]), mask),
            "block_influence": _mean(2 * jnp.square(turned), mask),
            "angle": _mean(halves, mask) / (jnp.pi / 2),
            "last_angle": halves[..., _last(mask)] / (jnp.pi / 2),
            "stream": _mean(length[..., 0], mask),
        }


@dataclasses.dataclass(frozen=True)
class RemovalPass(LayerPass):
    """`layer_removal` layer by layer, which carries the states of networks without a block.

    Slot s is the network without the block that begins with layer s; it exists from that layer on,
    and empty slots cost nothing.
    """

    size: int = 1  # layers of a block
    spare: int = 0  # first tokens that keep them

    def init_carry(
        self, prepared: PreparedInputs, config: TransformerConfig
    ) -> Float[Array, "s n d"]:
        """Slots for the states."""
        if not 1 <= self.size <= config.depth:
            raise ValueError(f"size={self.size} is not between 1 and depth={config.depth}")
        blocks = config.depth - self.size + 1
        return jnp.zeros((blocks, *prepared.x.shape), prepared.x.dtype)

    def measure_layer(
        self, layer: Layer, x: Any, seen: Any, carry: Any
    ) -> tuple[Any, Float[Array, "s 2"]]:
        """The layer in every network that has it; how its change differs."""
        mask = layer.inputs.token_mask
        whole = seen.trace.hidden
        change = zero_padding(whole - x, mask)
        exists = jnp.ones(len(x), bool) if mask is None else mask
        spared = exists & (jnp.cumsum(exists) <= self.spare)

        def applied(x):
            after = compute_layer(layer, x).trace.hidden
            differs = zero_padding(after - x, mask) - change
            lengths = jnp.linalg.norm(differs, axis=-1), jnp.linalg.norm(change, axis=-1)
            each = lengths[0] / jnp.where(lengths[1] == 0, 1, lengths[1])
            return after, jnp.linalg.norm(differs) / jnp.linalg.norm(change), jnp.max(each)

        def one(_, item):
            s, other = item
            past, here = layer.index >= s + self.size, layer.index == s
            stays = (other, *[jnp.zeros((), other.dtype)] * 2)
            moved, *differs = jax.lax.cond(past, applied, lambda _: stays, other)
            moved = jnp.where(here, x, moved)
            kept = spared[:, None] & (layer.index >= s) & ~past
            return None, (jnp.where(kept, whole, moved), jnp.stack(differs))

        _, (carry, found) = jax.lax.scan(one, None, (jnp.arange(len(carry)), carry))
        return carry, found

    def build_result(self, walked: WalkResult) -> dict[str, Float[Array, "..."]]:
        """The measures by name."""
        whole, mask = walked.output, walked.prepared.token_mask
        without = jax.vmap(lambda x: walked._replace(last_state=x).output)(walked.carry)
        output, rest = zero_padding(whole, mask), zero_padding(without, mask)
        return {
            "later": walked.layer_results[..., 0].T,
            "later_most": walked.layer_results[..., 1].T,
            "cosine": mean_cosine(rest, output, mask),
            "error": jnp.linalg.norm(rest - output[None], axis=(-2, -1)) / jnp.linalg.norm(output),
            "output": whole,
            "outputs": without,
        }


def zero_padding(a: Float[Array, "*s n d"], mask: Any) -> Float[Array, "*s n d"]:
    """Tokens that do not exist as zeros; the mask is Bool [n], or None for all."""
    return a if mask is None else jnp.where(mask.reshape((1,) * (a.ndim - 2) + (-1, 1)), a, 0)


def mean_cosine(a: Float[Array, "k n d"], b: Float[Array, "n d"], mask: Any) -> Float[Array, "k"]:
    """Mean over the tokens i that exist of cos(a_i, b_i), 0 where one of them is 0."""
    return _mean(_cosine(a, b[None]), mask)


def _cosine(a, b):
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return jnp.sum(a * b, axis=-1) / jnp.where(lengths == 0, 1, lengths)


def _last(mask):
    """The index of the last token that exists."""
    return -1 if mask is None else jnp.max(jnp.arange(len(mask)) * mask)


def _mean(values, mask):
    """Mean over the last axis, the tokens that exist."""
    if mask is None:
        return jnp.mean(values, axis=-1)
    mask = mask.reshape((1,) * (values.ndim - 1) + (-1,))
    return jnp.sum(jnp.where(mask, values, 0), axis=-1) / jnp.sum(mask)


def _mean_ratio(stream, part, mask):
    length = jnp.linalg.norm(stream, axis=-1)
    return _mean(jnp.linalg.norm(part, axis=-1) / jnp.where(length == 0, 1, length), mask)
