"""Attention functions, and their scores, weights and gradients on random draws."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.measures.attention import largest_weight, saturated_share
from rank_collapse.network.attention import attention_scores, multi_head_attention
from rank_collapse.network.attention_config import Score


class ScoreVariance(NamedTuple):
    """Variance of a score, and its part within a row, which is all that the softmax sees."""

    total: float
    within_rows: float


# The variance of tanh takes more nodes than the expansions: 80 for 3e-7 of it.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()  # of the standard normal distribution


def score_variance(
    d_k: int, score: Score = "dot", *, scale: bool = True, temperature: float = 1.0
) -> ScoreVariance:
    """Computes Var s(q, k) at independent q, k ~ N(0, I) of width d_k, in closed form.

    Dot product: d_k, divided by d_k if it is scaled; all of it within rows, since E[q·k | q] = 0.
    Additive, Σ_a v_a tanh(q_a + k_a) with v_a of variance 1/d_k: E tanh²(√2 z), z ~ N(0, 1), for
    any d_k; within rows this minus E_q (E_k tanh(q + k))². A temperature divides scores.

    Args:
        d_k: Width of queries and keys.
        score: "dot" or "additive".
        scale, temperature: See `attention_scores`.

    Source: Vaswani et al. 2017, "Attention is all you need", section 3.2.1, footnote 4 (dot
    products); additive scores follow in the same way.
    """
    if score == "dot":
        variance = (1.0 if scale else float(d_k)) / temperature**2
        return ScoreVariance(variance, variance)
    total = np.sum(_WEIGHTS * np.tanh(math.sqrt(2) * _NODES) ** 2)
    mean_given_query = np.tanh(_NODES[:, None] + _NODES[None, :]) @ _WEIGHTS
    within = total - np.sum(_WEIGHTS * mean_given_query**2)
    return ScoreVariance(float(total) / temperature**2, float(within) / temperature**2)


@dataclass(frozen=True)
class Form:
    """One attention function: its score, and the factor on it."""

    label: str  # In figures
    score: str  # Of the configuration
    scaled: bool = False  # Whether the scores are divided by √d_k
    matched: bool = False  # Whether they vary within a row as dot products without scaling do

    def options(self, d_k: int) -> dict[str, str | bool | float]:
        """Returns keyword arguments of `attention_scores` at a width.

        "temperature" divides the scores: by √d_k for scaled scores; for matched ones by the factor
        that gives additive scores the variance of unscaled dot products within a row.

        Args:
            d_k: Width of queries and keys.
        """
        temperature = math.sqrt(d_k) if self.scaled else 1.0
        if self.matched:
            additive, dot = (
                score_variance(d_k, score, scale=False).within_rows for score in (self.score, "dot")
            )
            temperature = math.sqrt(additive / dot)
        return {"score": self.score, "scale": False, "temperature": temperature}

    def laws(self, widths: Sequence[int]) -> dict[str, np.ndarray]:
        """Computes the variance of the scores in closed form, {name of `LAWS`: [w]}."""
        variances = [score_variance(d_k, **self.options(d_k)) for d_k in widths]
        return dict(zip(LAWS, np.transpose(variances), strict=True))


# The note compares the first three. The fourth separates the tanh from the size of its weights
# v: the library draws v with variance 1/d_k, which holds additive scores small as 1/√d_k does
# dot products; of v scaled to the variance of dot products the form alone is left.
FORMS = {
    "dot": Form("dot product", "dot"),
    "scaled_dot": Form(r"dot product $/\sqrt{d_k}$", "dot", scaled=True),
    "additive": Form("additive", "additive"),
    "additive_matched": Form("additive, $v$ scaled to match", "additive", matched=True),
}

MEASURES = (
    "variance",
    "variance_within_rows",
    "entropy",
    "largest_weight",
    "saturated",
    "query_gradient",
    "median_query_gradient",
    "score_gradient",
    "median_score_gradient",
)
LAWS = ("variance_law", "variance_within_rows_law")


def make_measure(d_k: int, num_tokens: int, threshold: float) -> Callable:
    """Makes measure(key, None) of one seed: {form: {measure: number}}, all on the same draws.

    Args:
        d_k: Width of queries and keys.
        num_tokens: Number of queries, and of keys.
        threshold: Largest weight from which a row counts as saturated.
    """

    def measure(key, _):
        q, k, goal, params = draw(key, d_k, num_tokens)
        return {
            name: measure_form(params, q, k, goal, form.options(d_k), threshold)
            for name, form in FORMS.items()
        }

    return measure


def draw(
    key: jax.Array, d_k: int, num_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array, rc.network.AttentionParams]:
    """Draws queries, keys, a goal G, and one head that takes queries and keys as they are.

    W_V and the v of additive scores have the variance 1/d_k that the library draws them with.

    Args:
        key: Random key of the seed.
        d_k: Width of queries and keys.
        num_tokens: Number of queries, and of keys.

    Returns:
        (queries, keys, G, parameters of the head); the first three are [n, d_k].
    """
    # One draw, since random numbers take longest to compile.
    normals = jax.random.normal(key, (3 * num_tokens + d_k + 1, d_k))
    q, k, goal, w_v, v_score = jnp.split(normals, np.cumsum([num_tokens] * 3 + [d_k]))
    identity = jnp.eye(d_k)[None]
    params = rc.network.AttentionParams(
        w_q=identity,
        w_k=identity,
        w_v=w_v[None] / jnp.sqrt(d_k),
        w_o=identity,
        v_score=v_score / jnp.sqrt(d_k),
    )
    return q, k, goal / jnp.sqrt(d_k), params


def measure_form(
    params: rc.network.AttentionParams,
    q: jax.Array,
    k: jax.Array,
    goal: jax.Array,
    options: dict[str, str | bool | float],
    threshold: float,
) -> dict[str, jax.Array]:
    """Measures scores, weights and gradients of one attention function on one seed's draws.

    The loss is Σ G ∘ (P V), where the entries of V = K W_V and of √d_k G have unit variance, so it
    weights every output equally. "query_gradient" is √(mean_i ‖∂/∂q_i‖²): the first-order change of
    the loss when a query moves by a vector of unit variance, like the query itself.
    "median_query_gradient" is ‖∂/∂q_i‖ of a typical query. The others are the same for the scores,
    through the softmax alone.

    Args:
        params, q, k, goal: Arrays from `draw`.
        options: Keyword arguments of `attention_scores`.
        threshold: Largest weight from which a row counts as saturated.
    """

    def compute_loss(q, offset):
        output, weights = multi_head_attention(
            params, q, k, **options, edit={"scores": lambda value, _: value + offset}
        )
        return jnp.sum(goal * output), weights

    no_offset = jnp.zeros((1, len(q), len(k)))
    gradients, weights = jax.grad(compute_loss, argnums=(0, 1), has_aux=True)(q, no_offset)
    scores = attention_scores(params, q, k, **options)
    return {
        "variance": jnp.var(scores),
        "variance_within_rows": jnp.mean(jnp.var(scores, axis=-1)),
        "entropy": rc.attention_entropy(weights)[0],
        "largest_weight": largest_weight(weights)[0],
        "saturated": saturated_share(weights, threshold)[0],
        **_gradient_sizes("query_gradient", gradients[0]),
        **_gradient_sizes("score_gradient", gradients[1][0]),
    }


def _gradient_sizes(name: str, rows: jax.Array) -> dict[str, jax.Array]:
    norms = jnp.linalg.norm(rows, axis=-1)
    return {name: jnp.sqrt(jnp.mean(norms**2)), f"median_{name}": jnp.median(norms)}
