"""A trained model's metrics by path length: sampled sets, exact sums, cumulative, whole.

Axis letters: b examples, n tokens, c classes, k path lengths, r repeats, p paths, l layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rank_collapse.measures.norms import singular_values
from rank_collapse.measures.residuals import effective_rank, residual_ratio
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.transformer import apply
from rank_collapse.paths.chains import branch_sizes, skip_share
from rank_collapse.paths.contributions import path_contributions
from rank_collapse.paths.sets import batch_path_set_logits, read_out
from rank_collapse.training.models import Model, batch_forward
from rank_collapse.training.tasks.examples import Examples

Metrics = Mapping[str, Callable[[Float[Array, "b n c"], Any], Float[Array, ""]]]


def whole_model(
    model: Any, examples: Any, config: Any, metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, Float[Array, ""]]:  # fmt: skip
    """Metrics of the model as it is, without dropout.

    Args:
        model: Trained weights, of a network with a read-out or of an encoder-decoder.
        examples: Evaluation data.
        config: The network.
        metrics: Functions of (logits, examples) by name.
        batch_size: Examples at a time, to bound the memory.
    """
    logits = batch_forward(model, examples, config, batch_size=batch_size)
    return {name: fn(logits, examples) for name, fn in metrics.items()}


def path_sets(
    model: Model, examples: Examples, config: TransformerConfig, metrics: Metrics,
    paths: Int[Array, "k r p l"], *, semantics: str = "recomputed", no_sub_path: bool = False,
    batch_size: int | None = None,
) -> dict[str, Float[Array, "k r"]]:  # fmt: skip
    """Metrics of sampled sets of paths; see `rank_collapse.paths.sets`."""
    logits = batch_path_set_logits(
        model.network, model.classifier, examples.inputs, config, paths, mask=examples.mask,
        semantics=semantics, no_sub_path=no_sub_path, batch_size=batch_size,
    )  # fmt: skip
    logits = jnp.moveaxis(logits, 0, 2)
    return _each(metrics, logits.reshape(-1, *logits.shape[2:]), examples, paths.shape[:2])


def exact_sums(
    model: Model, examples: Examples, config: TransformerConfig, metrics: Metrics,
    batch_size: int | None = None,
) -> dict[str, dict[str, Float[Array, "k"]]]:  # fmt: skip
    """Metrics of the exact sum over all frozen paths of each length 0..L, and of lengths up to k.

    "exact": the terms C_k of one length, normalised without gain and bias before the classifier,
    as sampled sets are. "up_to": Σ_{j≤k} C_j and the offset, read as the whole model is: its last
    entry is the whole model. "all_but": the output without C_k, read in the same way.
    """

    def single(item):
        inputs, mask = item
        parts = path_contributions(model.network, inputs, config, mask=mask)
        return {
            "exact": read_out(model.classifier, parts.by_attention_length),
            "up_to": read_out(model.classifier, parts.up_to(), normalize=False),
            "all_but": read_out(model.classifier, parts.all_but(), normalize=False),
        }

    size = min(batch_size or len(examples), len(examples))
    logits = jax.lax.map(single, (examples.inputs, examples.mask), batch_size=size)
    return {
        name: _each(metrics, jnp.moveaxis(values, 0, 1), examples, (config.depth + 1,))
        for name, values in logits.items()
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
        return branch_sizes(apply(model.network, inputs, config, mask=mask), mask=mask)

    return skip_share(*jax.lax.map(single, (examples.inputs, examples.mask)))


def _each(metrics, logits, examples, shape):
    """Metrics of logits [sets, b, n, c], reshaped to `shape`."""
    return {
        name: jax.lax.map(lambda l, f=fn: f(l, examples), logits).reshape(shape)
        for name, fn in metrics.items()
    }


__all__ = [
    "exact_sums", "layer_alpha", "layer_ranks", "path_sets", "whole_model",
]  # fmt: skip
