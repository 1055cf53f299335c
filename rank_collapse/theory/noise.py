"""Rounding made visible: copies of a computation whose operands are moved in their last digits.

What survives in all copies did not hang on rounding. The passes over a network in logarithms
(`logdomain`, `pairs`) run beside such copies and say NaN where these disagree.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# By how many units in the last place each operand of a copy is moved at most. Moves of −2 .. 2 have
# five times the standard deviation of one rounding (√2 and 1/√12 ulps): where every operand is
# moved, a pass spoilt by rounding goes with copies that scatter farther.
ULPS = 2
# Copies may differ by ABSOLUTE decades, or by RELATIVE of the logarithm where that is more:
# the second digit of a residual, and what float32 keeps of a logarithm near 1e5.
ABSOLUTE, RELATIVE = 1e-2, 1e-3


def copies(replicas: int) -> tuple[Array, Array]:
    """(word, ulps) of one pass without noise and of its noisy copies, for `Noise`."""
    words = jnp.arange(1 + replicas, dtype=jnp.uint32)
    return words, jnp.where(words == 0, 0, ULPS).astype(jnp.uint32)


def certain(
    profiles: Any, agree: Any = None, *, absolute: float = ABSOLUTE, relative: float = RELATIVE
) -> Float[Array, "l"]:
    """The first copy's logarithms, NaN from the layer on where the copies differ.

    Args:
        profiles: Of the pass without noise and of the noisy ones, [copies, L + 1].
        agree: Bool of the same shape: what else must hold in each copy and layer.
        absolute, relative: How far copies may differ; less where not every operand is moved.
    """
    first = profiles[0]
    nothing = jnp.all(profiles == -jnp.inf, axis=0)  # all tokens equal in every copy
    spread = jnp.max(profiles, axis=0) - jnp.min(profiles, axis=0)
    allowed = jnp.maximum(absolute, relative * jnp.abs(first))
    sure = (spread <= allowed) & jnp.all(jnp.isfinite(profiles), axis=0) | nothing
    if agree is not None:
        sure = sure & jnp.all(agree, axis=0)
    return jnp.where(jnp.cumsum(~sure) == 0, first, jnp.nan)


class Noise:
    """noise(a): a moved by −ulps .. ulps units in the last place, anew in every call and entry.

    An integer hash of (word, call, entry) is added to the bits: threefry would cost more than the
    arithmetic that it disturbs, and a product would be fused with the sums that follow, which then
    round differently where they are computed twice.

    Args:
        word: Uint32 of the replica; may be traced.
        ulps: Uint32; with 0 every operand stays as it is.
    """

    def __init__(self, word: Any, ulps: Any):
        self._word, self._ulps, self._calls = word, ulps, itertools.count(1)

    def __call__(self, a: Any) -> Any:
        ulps = self._ulps
        counter = jax.lax.iota(jnp.uint32, math.prod(a.shape)).reshape(a.shape)
        random = _hash(counter * jnp.uint32(0x9E3779B9) + _hash(self._next()))
        steps = ((random >> 16) * (2 * ulps + 1)) >> 16  # 0 .. 2 ulps
        bits = jax.lax.bitcast_convert_type(a, f"uint{8 * a.dtype.itemsize}")
        moved = bits + steps.astype(bits.dtype) - ulps.astype(bits.dtype)
        moved = jax.lax.bitcast_convert_type(moved, a.dtype)
        return jnp.where((a != 0) & jnp.isfinite(a), moved, a)

    def at(self, index: Any) -> "Noise":
        """Noise of its own for one turn of a loop, whose body is traced once."""
        return Noise(_hash(self._next()) + index.astype(jnp.uint32), self._ulps)

    def _next(self):
        return self._word + jnp.uint32(next(self._calls))


class Silence:
    """Noise that moves nothing and costs nothing."""

    def __call__(self, a: Any) -> Any:
        return a

    def at(self, index: Any) -> "Silence":
        return self


def _hash(h):
    h = (h ^ (h >> 16)) * jnp.uint32(0x21F0AAAD)
    h = (h ^ (h >> 15)) * jnp.uint32(0x735A2D97)
    return h ^ (h >> 15)
