"""Attention on random queries and keys: what its scores, weights and gradients are like.

As in the note, the components of queries and keys are independent, of mean 0 and variance 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import traverse_util

import rank_collapse as rc
from experiments.attention_forms.forms import FORMS
from experiments.shell import cli
from experiments.shell.progress import Progress
from rank_collapse.measures.attention import largest_weight, saturated_share
from rank_collapse.network.attention import attention_scores, multi_head_attention
from rank_collapse.runs import seeds
from rank_collapse.runs.folder import RunFolder

MEASURES = (
    "variance", "variance_within_rows", "entropy", "largest_weight", "saturated",
    "query_gradient", "median_query_gradient", "score_gradient", "median_score_gradient",
)  # fmt: skip


def measure_widths(options: flags.FlagValues, run: RunFolder) -> dict[str, dict[str, np.ndarray]]:
    """{form: {"d_k" [w], measure: [s, w]}} at the widths of the flags."""
    keys, mesh = seeds.seed_keys(options.seed, options.num_seeds), cli.mesh(options)
    by_width = []
    with Progress(len(options.d_k), "random queries and keys", log=run.log) as progress:
        for d_k in options.d_k:

            def compute(d_k=d_k):
                measure = make_measure(d_k, options.num_tokens, options.saturation)
                found = seeds.map_seeds(measure, keys, mesh=mesh, at_once=1)
                return traverse_util.flatten_dict(found, sep="/")

            by_width.append(run.cached(f"random d_k={d_k}", compute))
            progress.advance()
    return {
        form: {"d_k": np.asarray(options.d_k)}
        | {m: np.stack([found[f"{form}/{m}"] for found in by_width], axis=1) for m in MEASURES}
        for form in FORMS
    }


def make_measure(d_k: int, num_tokens: int, threshold: float) -> Callable:
    """measure(key, None) of one seed: {form: {measure: number}}, all forms on the same draws."""

    def measure(key, _):
        q, k, goal, params = draw(key, d_k, num_tokens)
        return {
            name: measure_form(params, q, k, goal, form.options(d_k), threshold)
            for name, form in FORMS.items()
        }

    return measure


def draw(key: Any, d_k: int, num_tokens: int) -> tuple[Any, Any, Any, rc.AttentionParams]:
    """Queries, keys and G [n, d_k], and one head that takes queries and keys as they are.

    W_V and the v of additive scores have the variance 1/d_k that the library draws them with.
    """
    # One draw, since random numbers take longest to compile.
    drawn = jax.random.normal(key, (3 * num_tokens + d_k + 1, d_k))
    q, k, goal, w_v, v_score = jnp.split(drawn, np.cumsum([num_tokens] * 3 + [d_k]))
    same = jnp.eye(d_k)[None]
    params = rc.AttentionParams(
        w_q=same, w_k=same, w_v=w_v[None] / jnp.sqrt(d_k), w_o=same,
        v_score=v_score / jnp.sqrt(d_k),
    )  # fmt: skip
    return q, k, goal / jnp.sqrt(d_k), params


def measure_form(
    params: rc.AttentionParams, q: Any, k: Any, goal: Any, options: dict[str, Any], threshold: float
) -> dict[str, Any]:
    """Scores, weights and gradients of one attention function on one seed's queries and keys.

    The gradients are those of Σ G ∘ (P V), the entries of V = K W_V and √d_k G of unit variance:
    of a loss that moves every output by as much. "query_gradient" is √(mean_i ‖∂/∂q_i‖²), the
    change of the loss to first order when a query is moved by a vector of unit variance, as the
    query itself is; "median_query_gradient" the ‖∂/∂q_i‖ of a typical query; the others the same
    to the scores, through the softmax alone.
    """

    def loss(q, moved):
        output, weights = multi_head_attention(
            params, q, k, **options, edit=lambda name, v: v + moved if name == "scores" else v
        )
        return jnp.sum(goal * output), weights

    still = jnp.zeros((1, len(q), len(k)))
    (of_queries, of_scores), weights = jax.grad(loss, argnums=(0, 1), has_aux=True)(q, still)
    scores = attention_scores(params, q, k, **options)
    return {
        "variance": jnp.var(scores),
        "variance_within_rows": jnp.mean(jnp.var(scores, axis=-1)),
        "entropy": rc.attention_entropy(weights)[0],
        "largest_weight": largest_weight(weights)[0],
        "saturated": saturated_share(weights, threshold)[0],
        **_sizes("query_gradient", of_queries),
        **_sizes("score_gradient", of_scores[0]),
    }


def _sizes(name: str, rows: Any) -> dict[str, Any]:
    norms = jnp.linalg.norm(rows, axis=-1)
    return {name: jnp.sqrt(jnp.mean(norms**2)), f"median_{name}": jnp.median(norms)}
