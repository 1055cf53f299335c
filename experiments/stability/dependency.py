"""The weight of each residual branch in the stream after it: the dependency of Liu et al. 2020.

Axis letters: n tokens, d width, l layers, s sublayers (branches) in the order passed.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import replay
from rank_collapse.network.residual import scale_summands
from rank_collapse.network.trace import Trace


@jax.jit
def branch_shares(
    params: TransformerParams, trace: Trace, config: TransformerConfig
) -> Float[Array, "s"]:
    """Computes β_ii² = γ² Var f_i/(λ² Var x_{i−1} + γ² Var f_i) of each branch, from variances
    alone.

    As published, branch and stream are assumed to be uncorrelated.

    Args:
        params: Parameters of the network; norms of branches and learned gains are read.
        trace: Trace from `apply`.
        config: The network, for its gains and skips.

    Returns:
        [s], branch after branch and layer after layer; 0 where a sum does not vary.

    Source: Liu et al. 2020, section 4 and appendix A.
    """

    def compute_shares(_, sublayers):
        return jnp.stack([_branch_share(passage) for passage in sublayers.values()])

    return replay(compute_shares, params, trace, config).reshape(-1)


def _branch_share(passage):
    """Computes β_ii² of a sublayer: the variance of its branch over that of the sum after it."""
    stream, part = scale_summands(passage.spec, passage.state, passage.branch_output)
    # over the features, as LayerNorm takes it, averaged over tokens
    branch, before = (jnp.mean(jnp.var(x, axis=-1)) for x in (part, stream))
    total = branch + (before if passage.spec.skip else 0.0)
    return jnp.where(total == 0, 0, branch / jnp.where(total == 0, 1, total))


def dependency(shares: ArrayLike) -> Float[Array, "i i"]:
    """Computes β_ij² of x̂_i = Σ_j β_ij â_j: the stream after i branches, in branches of variance
    1.

        β_ii² = the share of branch i in its sum, β_ij² = (1 − β_ii²) β_{i−1,j}²,

    for post- and pre-norm alike: a norm scales all parts by one factor, which the normalisation of
    x_i removes again. Every row sums to 1.

    Args:
        shares: β_ii² [N], from `branch_shares` or predicted (`ExpectedTrace.shares`).

    Returns:
        [N + 1, N + 1]; row and column 0 are the input. The published heat map is its square root.

    Source: Liu et al. 2020, section 4, and its heat maps.
    """
    shares = jnp.asarray(shares)
    size = shares.shape[0] + 1
    first = jnp.zeros(size, shares.dtype).at[0].set(1)
    _, rows = jax.lax.scan(_after_branch, first, (jnp.arange(1, size), shares))
    return jnp.concatenate([first[None], rows])


def _after_branch(row, step):
    """Adds a branch; a function of the module, since a local one would compile in every call."""
    index, share = step
    row = ((1 - share) * row).at[index].set(share)
    return row, row
