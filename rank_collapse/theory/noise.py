"""Tests for rounding errors: copies of a computation with perturbed last digits of operands.

A value that is the same in all copies did not depend on rounding. The pass over a network in
logarithms (`logdomain`) runs together with such copies and returns NaN where they disagree.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike, Leaf, Number

# By how many units in the last place each operand of a copy is moved at most. Moves of −2 .. 2 have
# five times the standard deviation of one rounding (√2 and 1/√12 ulps).
ULPS = 2
# A logarithm is off by at most ABSOLUTE decades, or by RELATIVE of it where that is more: the
# second digit of a residual, and what float32 keeps of a logarithm near 1e5. Copies may differ by
# half of that, since not every operand is moved.
ABSOLUTE, RELATIVE = 1e-2, 1e-3


def make_copies(replicas: int) -> tuple[Array, Array]:
    """Returns (word, ulps) for `Noise` of one pass without noise and of its noisy copies."""
    words = jnp.arange(1 + replicas, dtype=jnp.uint32)
    return words, jnp.where(words == 0, 0, ULPS).astype(jnp.uint32)


def mask_uncertain(profiles: ArrayLike) -> Float[Array, "l"]:
    """Returns the first copy's logarithms, NaN from the layer on where the copies differ.

    Args:
        profiles: Profiles of the pass without noise and of the noisy ones, [copies, L + 1].
    """
    first = profiles[0]
    is_equal = jnp.all(profiles == -jnp.inf, axis=0)  # all tokens, in every copy
    spread = jnp.max(profiles, axis=0) - jnp.min(profiles, axis=0)
    allowed = jnp.maximum(ABSOLUTE / 2, RELATIVE / 2 * jnp.abs(first))
    agrees = (spread <= allowed) & jnp.all(jnp.isfinite(profiles), axis=0)
    return jnp.where(jnp.cumsum(~(agrees | is_equal)) == 0, first, jnp.nan)


class Noise:
    """noise(a): a moved by −ulps .. ulps units in the last place, drawn for every call and entry.

    An integer hash of (word, call, entry) is added to the bits, since threefry would cost more than
    the arithmetic that it disturbs. A factor instead would be fused with the sums that follow,
    which then round differently where they are computed twice. The uint32 words of a replica and
    its ulps may be traced; with 0 ulps nothing moves.
    """

    def __init__(self, word: object, ulps: Number):
        self._word, self._ulps, self._calls = word, ulps, itertools.count(1)

    def __call__(self, a: ArrayLike) -> Leaf:
        ulps = self._ulps
        counter = jax.lax.iota(jnp.uint32, math.prod(a.shape)).reshape(a.shape)
        random = _hash_bits(counter * jnp.uint32(0x9E3779B9) + _hash_bits(self._next_word()))
        steps = ((random >> 16) * (2 * ulps + 1)) >> 16  # 0 .. 2 ulps
        bits = jax.lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}")
        moved = bits + steps.astype(bits.dtype) - ulps.astype(bits.dtype)
        moved = jax.lax.bitcast_convert_type(moved, a.dtype)
        return jnp.where((a != 0) & jnp.isfinite(a), moved, a)

    def at(self, index: object) -> "Noise":
        """Returns independent noise for one turn of a loop, whose body is traced once."""
        return Noise(_hash_bits(self._next_word()) + index.astype(jnp.uint32), self._ulps)

    def _next_word(self):
        return self._word + jnp.uint32(next(self._calls))


def _hash_bits(h):
    """Mix the bits of uint32 numbers (the finaliser of MurmurHash3, other constants)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x21F0AAAD)
    h = (h ^ (h >> 15)) * jnp.uint32(0x735A2D97)
    return h ^ (h >> 15)
