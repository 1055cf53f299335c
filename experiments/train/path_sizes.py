"""Sizes of paths by length: chained attention, the skip's share α, and predictions from α.

`predicted_sizes` has a measured twin, `measured_sizes`; both are log10, for sizes fall doubly
exponentially.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float

from rank_collapse import struct
from rank_collapse.annotations import Leaf
from rank_collapse.measures.norms import Norm, composite_norm, matrix_norm, safe_divide
from rank_collapse.measures.residuals import rank_one_ratio, residual
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import replay
from rank_collapse.network.precision import full_precision
from rank_collapse.network.residual import scale_summands
from rank_collapse.network.trace import Trace
from rank_collapse.paths.enumeration import check_paths


class Chain(struct.Struct):
    """A product of attention matrices as 1pᵀ + R: R keeps its digits where it is tiny compared with
    p."""

    mean: Leaf  # p, the mean row of the tokens that exist [n]
    residual: Leaf  # R [n, n]; its columns sum to 0, and rows of other tokens are 0

    @property
    def product(self) -> Float[Array, "*s n n"]:
        """1pᵀ + R."""
        return self.mean[..., None, :] + self.residual


def empty_chain(token_mask: Bool[Array, "n"], dtype: DTypeLike) -> Chain:
    """Make the product of no matrix, the identity; the mask says which tokens exist."""
    eye = jnp.eye(len(token_mask), dtype=dtype)
    return _add_to_mean(jnp.zeros_like(eye[0]), eye, token_mask)


def extend_chain(
    attention: Float[Array, "h n n"], choice: ArrayLike, chain: Chain, token_mask: Bool[Array, "n"]
) -> Chain:
    """Multiply a chain by one layer: P_h (1pᵀ + R) = 1pᵀ + P_h R.

    A row of P_h that sums to 1 up to rounding counts as a row that sums to 1: the difference times
    p would be larger than a tiny R.

    Args:
        attention: Weights of the layer.
        choice: h, or H for a skip, which leaves the chain as it is.
        chain: The product so far.
        token_mask: Bool, True for tokens that exist.
    """
    head = attention[jnp.minimum(choice, attention.shape[0] - 1)]
    drift = head.sum(axis=-1) - 1
    rounding = len(token_mask) * jnp.finfo(head.dtype).eps
    drift = jnp.where(jnp.abs(drift) <= rounding, 0, drift)
    change = drift[:, None] * chain.mean[None] + head @ chain.residual
    longer = _add_to_mean(chain.mean, change, token_mask)
    is_skip = choice == attention.shape[0]
    return jax.tree.map(lambda a, b: jnp.where(is_skip, a, b), chain, longer)


def _add_to_mean(mean, change, token_mask):
    """Split 1·meanᵀ + change into the mean row of the result and the differences from it.

    Args:
        mean: [n], the mean row so far.
        change: [n, n].
        token_mask: Bool, True for tokens that exist.
    """
    change = jnp.where(token_mask[:, None], change, 0)
    mean_change = change.sum(axis=0) / token_mask.sum()
    residual = jnp.where(token_mask[:, None], change - mean_change[None], 0)
    return Chain(mean + mean_change, residual)


@full_precision
def chained_residual(
    attention: Float[Array, "l h n n"],
    path: ArrayLike,
    norm: Norm = "composite",
    *,
    mask: Bool[Array, "n"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute ‖P_path − 1pᵀ‖/‖P_path‖ with p the mean row, and the same for the best rank one.

    For attention whose rows sum to 1, both are right to their own digits, down to the least number
    of the dtype (1e-38 in float32), and 0 below; for rows with another sum (a sink) they are right
    to the digits of P_path. Both are 0 where P_path = 0.

    Args:
        attention: Attention weights of all layers, `Trace.attention`.
        path: Heads 0..H−1, H for a skip (the identity).
        norm: Norm of matrices.
        mask: Bool [n], tokens that exist; rows of others are left out, and none may attend to them.

    Source: chained attention in the notebook of Dong et al. 2021; the product follows Theorem 2.1,
    with the last layer leftmost.
    """
    path = check_paths(path, *attention.shape[:2], all_heads=False)
    token_mask = jnp.ones(attention.shape[-1], bool) if mask is None else jnp.asarray(mask)
    chain = _multiply_chain(attention, jnp.asarray(path), token_mask)
    return chain_residual_ratios(chain, token_mask, norm)


@jax.jit
def _multiply_chain(attention, path, token_mask):
    """Multiply the matrices of a path, in one program that other paths and calls share."""

    def extend(chain, layer):
        return extend_chain(*layer, chain, token_mask), None

    start = empty_chain(token_mask, attention.dtype)
    return jax.lax.scan(extend, start, (attention, path))[0]


def chain_residual_ratios(
    chain: Chain, token_mask: Bool[Array, "n"], norm: Norm = "composite"
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute the two ratios of `chained_residual` of a finished product.

    If R is small, the best rank one leaves R(1 − vvᵀ) with v = p/‖p‖, up to a term of the order
    ‖R‖². Below the square root of the rounding error this is closer than a decomposition.

    Args:
        chain: The product.
        token_mask: Bool, True for tokens that exist.
        norm: Norm of matrices.

    Returns:
        (the ratio to the mean row, the ratio to the best matrix of rank one).
    """
    size = matrix_norm(jnp.where(token_mask[:, None], chain.product, 0), norm)
    length = matrix_norm(chain.mean[None], "frobenius")  # squares of p underflow, too
    direction = safe_divide(chain.mean, length, 0)
    first_order = chain.residual - jnp.outer(chain.residual @ direction, direction)
    to_mean = safe_divide(matrix_norm(chain.residual, norm), size, 0)
    to_rank_one = safe_divide(matrix_norm(first_order, norm), size, 0)
    is_small = to_mean < jnp.sqrt(jnp.finfo(to_mean.dtype).eps)
    exact = rank_one_ratio(chain.product, norm=norm, mask=token_mask)
    return to_mean, jnp.where(is_small, to_rank_one, exact)


@jax.jit
def branch_sizes(
    params: TransformerParams,
    trace: Trace,
    config: TransformerConfig,
    *,
    mask: Bool[Array, "n"] | None = None,
) -> tuple[Float[Array, "l"], Float[Array, "l"]]:
    """Measure N(λ x) and N(γ N'(SA(x))) of every layer, the summands of its attention sublayer.

    N = ‖.‖_{1,∞}, before a norm of the sum. Without gains and without a norm N' of the branch,
    these are N(x) and N(SA(x)) as published; N(x) alone if there is no skip.

    Args:
        params: Parameters of the network; norms of branches and learned gains are read.
        trace: Trace from `apply`, of one example.
        config: The network, for its gains and skips.
        mask: Bool [n], tokens that exist.
    """

    def measure(_, sublayers):
        values = sublayers["attention"]
        stream, branch = scale_summands(values.spec, values.state, values.branch_output)
        return composite_norm(stream, mask=mask), composite_norm(branch, mask=mask)

    return replay(measure, params, trace, config)


def skip_share(skip: Float[Array, "*s l"], branch: Float[Array, "*s l"]) -> Float[Array, "l"]:
    """Compute α_l = Σ N(x) / (Σ N(x) + Σ N(SA(x))), sums over samples, from `branch_sizes`.

    Args:
        skip, branch: Sizes by layer, of any number of samples.
    """
    axes = tuple(range(skip.ndim - 1))
    skip, branch = skip.sum(axis=axes), branch.sum(axis=axes)
    return skip / (skip + branch)


def log_elementary_shares(alpha: Float[Array, "l"]) -> Float[Array, "k"]:
    """Compute ln Σ_{|S|=k} Π_{l∉S} α_l Π_{l∈S} (1 − α_l) for k = 0 .. L, in logarithms.

    With one α for all layers this is ln C(L, k) α^{L−k} (1 − α)^k.

    Args:
        alpha: α_l of every layer, in (0, 1).
    """
    alpha = jnp.asarray(alpha)
    start = jnp.full(alpha.shape[0] + 1, -jnp.inf, alpha.dtype).at[0].set(0.0)
    return jax.lax.scan(_add_layer, start, alpha)[0]


def _add_layer(log_sums, a):
    """Add one layer. (In the module: a local function would compile the loop in every call.)"""
    longer = jnp.concatenate([jnp.full(1, -jnp.inf, log_sums.dtype), log_sums[:-1]])
    return jnp.logaddexp(log_sums + jnp.log(a), longer + jnp.log1p(-a)), None


def predicted_sizes(
    alpha: ArrayLike,
    depth: int,
    num_heads: int,
    initial: ArrayLike = 1.0,
    contraction: ArrayLike = 2.0,
) -> Float[Array, "k"]:
    """Compute log10 of C(L,k) H^k α^{L−k} (1−α)^k R_0 / c^{3^k − 1} for k = 0 .. L.

    This is the norm of the sum of all paths of length k, if every layer leaves the share α to its
    skip and attention contracts residuals cubically. With one α per layer, C(L,k) α^{L−k} (1−α)^k
    becomes the elementary symmetric sum over the choice of skipped layers.

    Args:
        alpha: α, a scalar or [L], each in (0, 1).
        depth, num_heads: L and H.
        initial: R_0, the size of the input's residual.
        contraction: c.

    Raises:
        ValueError: The number of α is neither 1 nor L.

    Source: the effectiveness of paths in Dong et al. 2021, section 4.
    """
    alpha = jnp.asarray(alpha, jnp.result_type(float))
    if alpha.shape not in ((), (depth,)):
        raise ValueError(f"alpha of shape {alpha.shape} is neither one value nor [{depth}]")
    k = jnp.arange(depth + 1)
    shares = log_elementary_shares(jnp.broadcast_to(alpha, depth))
    log_c = jnp.log(jnp.asarray(contraction, alpha.dtype))
    # 3^k overflows float32 from k = 81 on: harmless, the size is then 0, but not times ln 1 = 0.
    steps = jnp.power(jnp.asarray(3.0, alpha.dtype), k) - 1
    decay = jnp.where(log_c == 0, 0.0, steps * jnp.where(log_c == 0, 1.0, log_c))
    total = shares + k * jnp.log(jnp.asarray(num_heads, alpha.dtype)) - decay
    return (total + jnp.log(jnp.asarray(initial, alpha.dtype))) / jnp.log(10.0).astype(alpha.dtype)


def alpha_law(
    skip: Float[Array, "*s l"],
    branch: Float[Array, "*s l"],
    initial: Float[Array, "*s"],
    single: Float[Array, "*s p"],
    num_heads: int,
) -> tuple[Float[Array, "l"], Float[Array, "k"]]:
    """Predict path sizes by the α of each layer, from measured sizes of all samples together.

    R_0 is the mean residual of the inputs, before any layer. c belongs to single attention
    matrices: their mean log residual ratio equals that of R_0/c², the formula's value at length 1.

    Args:
        skip, branch: Sizes from `branch_sizes`.
        initial: ‖res(X^0)‖_{1,∞} of each sample.
        single: Residual ratios of paths of length 1, from `chained_residual`.
        num_heads: H.

    Returns:
        α_l [L], and log10 of the predicted sizes [L + 1].
    """
    alpha = skip_share(skip, branch)
    contraction = jnp.exp(-0.5 * jnp.log(single).mean())
    depth = skip.shape[-1]
    return alpha, predicted_sizes(alpha, depth, num_heads, initial.mean(), contraction)


def measured_sizes(
    by_length: Float[Array, "k n d"], *, mask: Bool[Array, "n"] | None = None
) -> tuple[Float[Array, "k"], Float[Array, "k"]]:
    """Measure log10 of ‖C_k‖_{1,∞} and ‖res(C_k)‖_{1,∞}, the exact sums of paths of length k.

    Args:
        by_length: C_k, from `path_contributions`.
        mask: Bool [n], which tokens exist.
    """

    def measure(c):
        return composite_norm(c, mask=mask), composite_norm(residual(c, mask=mask), mask=mask)

    size, residual_size = jax.vmap(measure)(by_length)
    return jnp.log10(size), jnp.log10(residual_size)
