"""Residual profiles that are right or NaN at any weights, from every pairwise difference.

One scale for all tokens (`logdomain`) is cheap and right while no two tokens come much closer than
others. Large weights make clusters within clusters; then each difference needs its own logarithm
(`pair_pass`), in a table or along a spanning tree; noisy copies of the pass (`noise`) tell whether
the digits lasted.

Axis letters: n tokens, d width, l layers.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import enter
from rank_collapse.network.precision import full_precision
from rank_collapse.theory import logdomain
from rank_collapse.theory.noise import certain
from rank_collapse.theory.pair_pass import TABLE, TREE, noisy_profiles

# Numbers in one table [n, n, d], of which a pass holds about 4 for each of its 4 copies:
# 2 GB in float64 at this limit, which is n = 512 at d = 64.
LARGEST_TABLE = 2**24
# Numbers in one of attention's arrays [h, n, n] ([h, n, n, c] where scores are sums over features)
# in a pass along a spanning tree. Time is the limit: each is computed anew for n tokens and 4
# copies, at 50 ns a number on two cores; n = 1024 with 4 heads takes a quarter of an hour a layer.
LARGEST_ATTENTION = 2**22


# From the cheapest to the dearest; the two in float64 are `certified_profiles`' alone.
PASSES = ("one scale", "one scale in float64", "pairs", "pairs in float64")


class CertifiedProfile(NamedTuple):
    """log10 residuals and which pass they come from.

    Attributes:
        profile: [L + 1]; NaN from the layer on where no pass is certain.
        passed: Int, the index of the pass in `PASSES`.
    """

    profile: Any
    passed: Any


@full_precision
def pair_profile(
    params: Any,
    x: Any,
    config: TransformerConfig,
    *,
    largest_table: int = LARGEST_TABLE,
    **inputs: Any,
) -> Float[Array, "l"]:
    """log10 ‖res(X^l)‖_{1,∞}, l = 0..L, around the mean token, at any weights: right or NaN.

    The state of the pass is the tokens and all differences x_i − x_k = e^{T_ik} U_ik; where a table
    of them is too large, the n − 1 along a spanning tree, from which all others follow
    (`spanning_tree`). The profile is computed four times, three of them with noise of 2 ulps on
    every operand, logarithms too. It is NaN from the layer on where these differ by more than
    max(0.01, 0.001 |value|), or where the tokens contradict the differences. Differences beyond
    3^80 or so, and those of equal tokens, have logarithm −inf.

    Costs O(h n³ + n² d²) a layer, times 4; by table n² d numbers, times 4, by tree n d + h n²,
    copy after copy.

    Args:
        params: Parameters of the network.
        x: Hidden states [n, d], or what `config.embedding` takes.
        config: The network; gains and temperature may be traced.
        largest_table: The numbers n² d up to which the table is taken; 0 for the tree at any size.
        inputs: mask, bias, segments, positions as for `rank_collapse.apply`. Tokens that a mask [n]
            leaves out are left out of the residual; one that exists and sees no key gives NaN.

    Returns:
        [L + 1] decimal logarithms in the arithmetic of x and the parameters, at least float32;
        jit at the outside, vmap over seeds.

    Raises:
        ValueError: Cross-attention, additive attention with rotary positions or normalised
            queries, inputs of the wrong shape, or too many tokens: n² d > `largest_table` and
            h n² > 2^22 (h n² c for additive scores and relative positions, c the heads' width).
    """
    return certain(*noisy_profiles(*_entered(params, x, config, inputs, largest_table)))


def _entered(params, x, config, inputs, largest_table=LARGEST_TABLE):
    """What `noisy_profiles` takes, checked."""
    if config.cross_attention:
        raise ValueError("cross_attention=True has a second input: no residual profile in logs")
    if config.score == "additive" and config.position == "rotary":
        raise ValueError("score='additive' with position='rotary' has no residual profile in logs")
    if config.score == "additive" and config.qk_norm != "none":
        raise ValueError(
            f"score='additive' with qk_norm={config.qk_norm!r} has no residual profile in logs"
        )
    params, entry = enter(params, x, config, **inputs)
    n, d = entry.x.shape
    form = TABLE if n * n * d <= largest_table else TREE
    by_feature = config.score == "additive" or params.layers.attention.relative is not None
    weights = config.num_heads * n * n * (config.qk_width if by_feature else 1)
    if form is TREE and weights > LARGEST_ATTENTION:
        raise ValueError(
            f"{n} tokens of width {d} are {n * n * d} numbers of pairwise differences, more than "
            f"{largest_table}, and {weights} in an array of attention, more than "
            f"{LARGEST_ATTENTION}"
        )
    dtype = jnp.promote_types(entry.x.dtype, jnp.float32)
    for leaf in jax.tree.leaves(params.layers):
        dtype = jnp.promote_types(dtype, leaf.dtype)
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    x = entry.x.astype(dtype)
    keep = jnp.ones(n, bool)
    if entry.token_mask is not None:
        keep = entry.token_mask
        x = jnp.where(keep[:, None], x, x[jnp.argmax(keep)][None, :])  # any finite token
    return params, entry.replace(x=x), config, keep, form


@full_precision
def certified_profile(
    params: Any, x: Any, config: TransformerConfig, *, mask: Any = None, **inputs: Any
) -> CertifiedProfile:
    """The one-scale profile where it is safe, else that from pairs; traced, for one example.

    Under vmap both passes are computed for every seed: `certified_profiles` selects on the host.

    Args, Raises: See `pair_profile`.
    """
    profile = logdomain.log_residual_profile(params, x, config, mask=mask, **inputs)
    return _chosen(profile, *_entered(params, x, config, {"mask": mask} | inputs))


@functools.partial(jax.jit, static_argnames="form")
def _chosen(profile, params, entry, config, keep, form):
    # Compiled here: a choice made outside jit would compile the pass over pairs in every call.
    entered = params, entry, config, keep, form
    safe = known(profile)
    profile = jax.lax.cond(safe, lambda: profile, lambda: certain(*noisy_profiles(*entered)))
    return CertifiedProfile(profile, jnp.where(safe, 0, PASSES.index("pairs")))


def known(profile: Any) -> Any:
    """Whether profiles [..., L + 1] have a value in every layer, −inf among them."""
    profile = jnp.asarray(profile)
    return ~jnp.any(jnp.isnan(profile) | (profile == jnp.inf), axis=-1)


def certified_profiles(
    params: Any,
    x: Any,
    config: TransformerConfig,
    *,
    profile: Any = None,
    batch: int = 16,
    float64: bool = True,
    pairs: bool = True,
    **inputs: Any,
) -> CertifiedProfile:
    """`certified_profile` of many seeds, each by the cheapest pass that is certain; on the host.

    The passes of `PASSES` in turn, each for the seeds where those before are not certain. All but
    the first in batches of `batch` seeds, which are compiled once.

    Args:
        params: Parameters with a leading seed axis.
        x: Inputs with a leading seed axis.
        config: The network, the same for all seeds.
        profile: `log_residual_profile` of every seed [s, L + 1], where it is known already.
        batch: Seeds per call of the dearer passes.
        float64: Whether the passes in float64 are tried.
        pairs: Whether those over pairs are, which take minutes to compile.
        inputs: See `pair_profile`; the same for all seeds.

    Returns:
        Profiles [s, L + 1] and passes [s], as NumPy arrays.
    """

    if profile is None:
        profile = _of_seeds(logdomain.log_residual_profile, params, x, config, inputs)
    profile = np.array(profile)
    profile[profile == np.inf] = np.nan
    passed = np.zeros(len(profile), int)
    network = (params, x, config, inputs)
    wide = float64 and profile.dtype == np.float32
    if wide:
        _again(logdomain.log_residual_profile, network, True, 1, batch, profile, passed)
    if pairs:
        _again(pair_profile, network, False, 2, batch, profile, passed)
    if pairs and wide:
        _again(pair_profile, network, True, 3, batch, profile, passed)
    return CertifiedProfile(profile, passed)


def _wide(a):
    a = np.asarray(a)
    return a.astype(np.float64) if np.issubdtype(a.dtype, np.floating) else a


@functools.partial(jax.jit, static_argnums=0)
def _of_seeds(profile_of, params, x, config, inputs):
    return jax.vmap(lambda p, x: profile_of(p, x, config, **inputs))(params, x)


def _again(profile_of, network, wide, number, batch, profile, passed):
    """A pass for the seeds that are not known to the end; kept where it knows as many layers.

    A batch at a time, the last one filled with repeats.
    """
    left = np.flatnonzero(~np.asarray(known(profile)))
    for start in range(0, len(left), batch):
        chosen = left[start : start + batch]
        filled = np.resize(chosen, batch)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            params, x, config, inputs = jax.tree.map(_wide, network) if wide else network
            some = jax.tree.map(lambda a, i=filled: a[i], (params, x))
            found = np.asarray(_of_seeds(profile_of, *some, config, inputs))[: len(chosen)]
        more = np.isnan(found).sum(axis=1) <= np.isnan(profile[chosen]).sum(axis=1)
        profile[chosen[more]], passed[chosen[more]] = found[more], number
