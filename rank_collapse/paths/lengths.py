"""Lengths of paths weighted by the output of each layer: branch shares, their law, rollouts.

Dong et al. 2021 count paths; most have length L H/(1 + H). Here each path has a weight. A layer's
attention branch has its share λ_l as weight, the skip 1 − λ_l, so the length of a path is a sum of
L independent coins (Poisson-binomial).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import checks
from rank_collapse.annotations import AnyArray, ArrayLike
from rank_collapse.measures.arrays import (
    as_array,
    as_floats,
    host_values_or_none,
    is_jax_array,
    is_traced,
    match_framework,
    namespace,
)
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.input_checks import as_mask
from rank_collapse.network.measured.influence import branch_share
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import replay
from rank_collapse.network.trace import Trace
from rank_collapse.printed import format_count


class BranchShares(NamedTuple):
    """Mean share of each layer's branches in the sums that they join.

    Attributes:
        attention: [L], λ_l of the attention branches.
        mlp: [L], the shares of the MLPs; None without MLPs.
    """

    attention: Array
    mlp: Array | None


def branch_shares(
    trace: Trace,
    params: TransformerParams,
    config: TransformerConfig,
    *,
    mask: ArrayLike | None = None,
) -> BranchShares:
    """Compute the share of each branch in its sum, λ_l = E ‖a_l‖ / (‖x_l‖ + ‖a_l‖).

    x_l is the stream before the branch with the skip's gain, a_l is the output of the branch with
    its gain and its norm, and E is the mean over tokens. A layer without a skip has the share 1.

    Args:
        trace: One example's forward pass, from `apply`.
        params, config: The network of the trace.
        mask: Bool [n], True for tokens that count; None for all. In language models the norm of
            token 0 is often far above the norms of the others, and its share far below.

    Raises:
        ValueError: A mask of another length, or a trace of another depth.

    Source: arXiv 2602.16837, equation of the residual-aware rollout.
    """
    kinds = (("trace", trace, Trace), ("params", params, TransformerParams))
    kinds += (("config", config, TransformerConfig),)
    for name, value, kind in kinds:
        checks.refuse_if(
            not isinstance(value, kind),
            f"{name} is a {type(value).__name__}, not a {kind.__name__}: "
            "branch_shares(trace, params, config)",
        )
    checks.refuse_if(
        len(trace.attention) != config.depth,
        f"trace has {format_count(len(trace.attention), 'layer')}, but config has "
        f"depth={config.depth}",
    )
    num_tokens = trace.hidden.shape[-2]
    is_counted = jnp.ones(num_tokens, bool) if mask is None else as_mask(mask)
    if is_counted.shape != (num_tokens,):
        raise ValueError(
            f"mask of shape {is_counted.shape} does not fit {format_count(num_tokens, 'token')}"
        )
    shares = _measure_shares(params, trace, config, is_counted)
    return BranchShares(shares["attention"], shares.get("mlp"))


@jax.jit
def _measure_shares(params, trace, config, is_counted):
    """Compute `branch_shares` by kind of sublayer, means over the tokens that count.

    Args:
        params, trace, config: See `branch_shares`.
        is_counted: Bool [n].
    """

    def measure_layer(layer, sublayers):
        return {
            kind: jnp.mean(branch_share(values), where=is_counted)
            for kind, values in sublayers.items()
        }

    return replay(measure_layer, params, trace, config)


def path_length_law(shares: ArrayLike) -> Float[AnyArray, "... lengths"]:
    """Compute the probability of each path length, given each layer's attention share.

    The law is that of a sum of independent coins: p ← (1 − λ_l) p + λ_l · (p moved by one), layer
    by layer. λ_l = H/(1 + H) in all layers gives the count of Dong et al. 2021.

    Args:
        shares: λ [..., L] in [0, 1], of NumPy, JAX or torch.

    Returns:
        [..., L + 1], probabilities of the lengths 0 .. L, in the framework of `shares`.

    Raises:
        ValueError: A number, or a share outside [0, 1].
    """
    shares = as_floats(_as_shares(shares))
    if not shares.ndim:
        raise ValueError(
            f"shares={shares} is a single number, but there must be one for each layer, [..., L]"
        )
    xp = namespace(shares)
    law = xp.ones_like(xp.sum(shares, axis=-1, keepdims=True))  # of 0 layers too
    zero = xp.zeros_like(law)
    for layer in range(shares.shape[-1]):
        share = shares[..., layer : layer + 1]
        skipped = xp.concat([(1 - share) * law, zero], axis=-1)
        taken = xp.concat([zero, share * law], axis=-1)
        law = skipped + taken
    return law


def rollout(attention: ArrayLike, shares: ArrayLike = 0.5, *, by_length: bool = False) -> AnyArray:
    """Compute the attention rollout P = Π_l ((1 − λ_l) I + λ_l A_l), the last layer leftmost.

    It is the sum of all frozen paths of a network with skip gains 1 − λ_l, branch gains λ_l and
    W_V W_O = I. MLPs do not enter. Where the weights are known, `path_contributions` is exact.

    Args:
        attention: Weights [L, h, n, n], whose heads are averaged, or [L, n, n]; of NumPy, JAX or
            torch. A list of layers [h, n, n], or of [1, h, n, n] such as `attentions` of
            transformers.
        shares: λ, a number or [L]; 0.5 is the rollout of Abnar and Zuidema 2020.
        by_length: Whether to return the terms by path length instead of their sum.

    Returns:
        P [n, n], or its terms [L + 1, n, n] by the number of layers attended through, in the
        framework and on the device of `attention`; float64 where that is, else float32.

    Raises:
        ValueError: Arrays of other axes, or another number of shares than of layers.
    """
    is_list = isinstance(attention, list | tuple)
    attention = as_floats(attention)
    if is_list and attention.ndim == 5 and attention.shape[1] == 1:
        attention = attention[:, 0]
    xp = namespace(attention)
    if attention.ndim not in (3, 4) or attention.shape[-1] != attention.shape[-2]:
        shape = tuple(attention.shape)
        raise ValueError(f"attention has the shape {shape}, but must be [L, h, n, n] or [L, n, n]")
    if attention.ndim == 4:
        attention = xp.mean(attention, axis=1)
    depth, num_tokens, _ = attention.shape
    attention, shares = match_framework(attention, _as_shares(shares))
    xp = namespace(attention)
    shares = xp.astype(shares, attention.dtype)
    if tuple(shares.shape) not in ((), (depth,)):
        shape = tuple(shares.shape)
        raise ValueError(
            f"shares have the shape {shape}, but must be a number or have the shape ({depth},)"
        )
    zero = attention[:1] * 0
    identity = match_framework(attention, np.eye(num_tokens, dtype=bool))[1]
    terms = zero + xp.astype(identity, attention.dtype)[None]
    for layer in range(depth):
        share = shares[layer] if shares.ndim else shares
        skipped = (1 - share) * terms
        attended = share * (attention[layer] @ terms)
        if by_length:
            terms = xp.concat([skipped, zero]) + xp.concat([zero, attended])
        else:
            terms = skipped + attended
    return terms if by_length else terms[0]


def _as_shares(shares):
    """Return shares as an array, and check values that are known on the host.

    Raises:
        ValueError: A share outside [0, 1].
    """
    shares = as_array(shares)
    is_known = is_jax_array(shares) and not is_traced(shares)
    values = np.asarray(shares) if is_known else host_values_or_none(shares)
    if values is not None and not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"shares={values} must all be from 0 to 1")
    return shares
