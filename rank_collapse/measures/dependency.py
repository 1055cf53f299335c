"""How much each residual branch weighs in the stream after it: the dependency of Liu et al. 2020.

Axis letters: n tokens, d width, l layers, s sublayers (branches) in the order passed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.gains import layer_gains, scaled
from rank_collapse.network.transformer import Trace


def sublayer_names(config: TransformerConfig) -> tuple[str, ...]:
    """"attention", "cross" and "mlp", those that a layer has, in the order passed."""
    has = {"attention": True, "cross": config.cross_attention, "mlp": config.mlp != "none"}
    return tuple(name for name, there in has.items() if there)


def token_variance(x: Float[Array, "*s n d"]) -> Float[Array, "*s"]:
    """Variance over the features, as LayerNorm takes it, averaged over tokens."""
    return jnp.mean(jnp.var(x, axis=-1), axis=-1)


def branch_shares(trace: Trace, config: TransformerConfig) -> Float[Array, "s"]:
    """β_ii² = γ² Var f_i/(λ² Var x_{i−1} + γ² Var f_i) of each branch, from variances alone.

    As published: branch and stream are taken as uncorrelated; `paths.dependency.variance_shares`
    does without that.

    Args:
        trace: From `apply`.
        config: The network, for its gains and skips.

    Source: Liu et al. 2020, section 4 and appendix A.
    """
    gains = layer_gains(config, trace.hidden.dtype)
    layers = trace.layers
    stages = {
        "attention": (trace.hidden[:-1], layers.attention_branch, config.attention_skip),
        "cross": (layers.after_attention, layers.cross_branch, config.cross_skip),
    }
    entering = layers.after_cross if config.cross_attention else layers.after_attention
    stages["mlp"] = (entering, layers.mlp_branch, config.mlp_skip)

    def share(name):
        x, part, skip = stages[name]
        branch = token_variance(jax.vmap(scaled)(getattr(gains.branch, name), part))
        kept = token_variance(jax.vmap(scaled)(getattr(gains.skip, name), x)) if skip else 0.0
        total = kept + branch
        return jnp.where(total == 0, 0, branch / jnp.where(total == 0, 1, total))

    return jnp.stack([share(name) for name in sublayer_names(config)], axis=1).reshape(-1)


def dependency(shares: Any) -> Float[Array, "s+1 s+1"]:
    """β_ij² of x̂_i = Σ_j β_ij â_j, the stream after i branches in normalised branches of variance 1.

        β_ii² = the share of branch i in its sum, β_ij² = (1 − β_ii²) β_{i−1,j}²,
    for post- and pre-norm alike: a norm scales all parts by one factor, which normalising x_i takes
    out again. Every row sums to 1.

    Args:
        shares: β_ii² [N], from `branch_shares` or predicted (`ExpectedTrace.shares`).

    Returns:
        [N + 1, N + 1]; row and column 0 are the input. The published heat map is its square root.

    Source: Liu et al. 2020, equation 2 and figure 7.
    """
    shares = jnp.asarray(shares)
    size = shares.shape[0] + 1

    def after(row, step):
        index, share = step
        row = ((1 - share) * row).at[index].set(share)
        return row, row

    first = jnp.zeros(size, shares.dtype).at[0].set(1)
    _, rows = jax.lax.scan(after, first, (jnp.arange(1, size), shares))
    return jnp.concatenate([first[None], rows])


def centre_of_mass(squares: Any) -> Float[Array, ""]:
    """Σ_j j β_Nj²/N of the last row: 1 where the output is its last branch, 0 its input."""
    last = jnp.asarray(squares)[-1]
    count = last.shape[0] - 1
    return jnp.sum(last * jnp.asarray(np.arange(count + 1), last.dtype)) / count
