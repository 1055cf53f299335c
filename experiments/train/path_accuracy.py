"""A trained model's metrics by path length: sampled sets, exact sums, cumulative, whole.

Axis letters: b examples, n tokens, c classes, k path lengths, r repeats, p paths, l layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.train.path_sizes import branch_sizes, skip_share
from rank_collapse.measures.norms import singular_values
from rank_collapse.measures.residuals import effective_rank, residual_ratio
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.transformer import apply
from rank_collapse.paths.contributions import path_contributions
from rank_collapse.paths.direct import logit_attribution
from rank_collapse.paths.sets import classify_states, path_set_logits
from rank_collapse.paths.sharing import coalition_values, covariance_shares, shapley_values
from rank_collapse.paths.truncation import truncated
from rank_collapse.training.models import Model, batch_forward
from rank_collapse.training.tasks.examples import Examples, in_batches

Metrics = Mapping[str, Callable[[Float[Array, "b n c"], Any], Float[Array, ""]]]


def whole_model(
    model: Any,
    examples: Any,
    config: Any,
    metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, Float[Array, ""]]:
    """Metrics, by name, of a model without dropout; `batch_size` examples at a time."""
    logits = batch_forward(model, examples, config, batch_size=batch_size)
    return {name: fn(logits, examples) for name, fn in metrics.items()}


def path_sets(
    model: Model,
    examples: Examples,
    config: TransformerConfig,
    metrics: Metrics,
    paths: Int[Array, "k r p l"],
    *,
    semantics: str = "recomputed",
    no_sub_path: bool = False,
    keep: Bool[Array, "k r p"] | None = None,
    batch_size: int | None = None,
) -> dict[str, Float[Array, "k r"]]:
    """Metrics of sampled sets of paths; see `rank_collapse.paths.sets`."""

    def single(item):
        inputs, mask = item
        return path_set_logits(
            model.network,
            model.classifier,
            inputs,
            config,
            paths,
            mask=mask,
            semantics=semantics,
            no_sub_path=no_sub_path,
            keep=keep,
        )

    logits = in_batches(single, (examples.inputs, examples.mask), batch_size)
    logits = jnp.moveaxis(logits, 0, 2)
    return _each(metrics, logits.reshape(-1, *logits.shape[2:]), examples, paths.shape[:2])


def length_sums(
    model: Model,
    examples: Examples,
    config: TransformerConfig,
    metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Metrics of exact sums over all paths, by length 0..L, and what each length is worth.

    Frozen, in the attention of the whole model. All but "alone" have the same offset and the same
    classifier, the whole model's, so that they differ in the lengths alone. The offset holds the
    biases, through the frozen 1/σ of the whole network: a network without any path already guesses.
        "offset"    []   no path
        "exact"     [k]  C_k + offset
        "up_to"     [k]  Σ_{j≤k} C_j + offset; the last is the whole model
        "from"      [k]  Σ_{j≥k} C_j + offset; the first is the whole model
        "all_but"   [k]  the output without C_k
        "shapley"   [k]  each metric's Shapley value of the lengths, from "offset" to the whole
        "alone"     [k]  C_k without the offset, normalised as sampled sets of paths are
    "truncated" [k], self-consistent: the network without paths longer than k, see `truncated`.
    "covariance" [k]: Cov(z_k, z)/Var z of the logits, whose shares sum to 1 with the offset's;
    "cancellation" []: Σ_k ‖C_k‖/‖Y‖ of the states, the offset's among them.
    """
    size = config.depth + 1

    def single(item):
        inputs, mask = item
        parts = path_contributions(model.network, inputs, config, mask=mask)
        kept = truncated(model.network, inputs, config, jnp.arange(size), mask=mask).output
        states = jnp.concatenate([parts.by_attention_length, parts.offset[None]])
        keep = jnp.ones(states.shape[1], bool) if mask is None else mask
        states = jnp.where(keep[None, :, None], states, 0)
        states = jnp.concatenate([states, states.sum(axis=0, keepdims=True)])
        alone = classify_states(model.classifier, parts.by_attention_length)
        return {
            "parts": logit_attribution(parts.by_attention_length, model.classifier),
            "offset": classify_states(model.classifier, parts.offset, normalize=False),
            "others": jnp.stack([alone, classify_states(model.classifier, kept, normalize=False)]),
            "squares": jnp.sum(jnp.square(states), axis=(1, 2)),
        }

    found = in_batches(single, (examples.inputs, examples.mask), batch_size)
    offset, parts = found["offset"], jnp.moveaxis(found["parts"], 0, 1)  # [b, n, c], [k, b, n, c]
    others = jnp.moveaxis(found["others"], 0, 2)  # [2, k, b, n, c]
    others = _each(metrics, others.reshape(-1, *offset.shape), examples, (2, size))

    def value(present):
        logits = offset + jnp.tensordot(present.astype(parts.dtype), parts, 1)
        return {name: fn(logits, examples) for name, fn in metrics.items()}

    values = coalition_values(value, size)
    bits, everything = 2 ** np.arange(size), 2**size - 1
    sets = {"offset": 0, "exact": bits, "up_to": 2 * bits - 1, "from": everything - bits + 1}
    sets["all_but"] = everything - bits
    norms = jnp.sqrt(jnp.sum(found["squares"], axis=0))
    return {
        **{name: {m: v[index] for m, v in values.items()} for name, index in sets.items()},
        "shapley": shapley_values(values, size),
        "alone": {name: v[0] for name, v in others.items()},
        "truncated": {name: v[1] for name, v in others.items()},
        "covariance": covariance_shares(parts, offset + parts.sum(axis=0), examples.mask),
        "cancellation": jnp.sum(norms[:-1]) / norms[-1],
    }


def layer_ranks(
    model: Model, examples: Examples, config: TransformerConfig, tolerance: float = 0.5
) -> dict[str, Float[Array, "k"]]:
    """Means over examples, by layer: ranks of hidden states [L + 1] and attention matrices [L].

    "rank": singular values above `tolerance`, as published; "effective_rank" (Roy and Vetterli
    2007); "residual_ratio"; "attention_rank": effective rank of P_h, mean over heads.
    """

    def single(item):
        inputs, mask = item
        trace = apply(model.network, inputs, config, mask=mask)
        states = {
            "rank": lambda x: jnp.sum(singular_values(x, mask=mask) > tolerance),
            "effective_rank": lambda x: effective_rank(x, mask=mask),
            "residual_ratio": lambda x: residual_ratio(x, mask=mask),
        }
        out = {n: jax.lax.map(f, trace.hidden).astype(jnp.float32) for n, f in states.items()}
        matrices = trace.attention
        if mask is not None:  # rows and columns of padding do not count
            matrices = matrices * (mask[:, None] & mask[None, :])[None, None]
        flat = matrices.reshape(-1, *matrices.shape[2:])
        ranks = jax.lax.map(effective_rank, flat).reshape(matrices.shape[:2])
        return out | {"attention_rank": ranks.mean(axis=1)}

    return jax.tree.map(
        lambda a: a.mean(axis=0), jax.lax.map(single, (examples.inputs, examples.mask))
    )


def layer_alpha(model: Model, examples: Examples, config: TransformerConfig) -> Float[Array, "l"]:
    """α_l = Σ N(x) / (Σ N(x) + Σ N(SA(x))) over examples, N = ‖.‖_{1,∞}, before the norm.

    The weight of the skip in layer l (Dong et al. 2021, appendix on path effectiveness).
    """

    def single(item):
        inputs, mask = item
        trace = apply(model.network, inputs, config, mask=mask)
        return branch_sizes(model.network, trace, config, mask=mask)

    return skip_share(*jax.lax.map(single, (examples.inputs, examples.mask)))


def _each(metrics, logits, examples, shape):
    """Metrics of logits [sets, b, n, c], reshaped to `shape`."""
    found = jax.lax.map(lambda l: {name: fn(l, examples) for name, fn in metrics.items()}, logits)
    return {name: values.reshape(shape) for name, values in found.items()}
