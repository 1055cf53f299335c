"""How fast a matrix of attention mixes tokens, from its width alone.

Axis letters: n tokens.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def spectral_ratio(score_std: Any, num_tokens: Any, per_feature: Any = None) -> Array:
    """σ₂/σ₁ of attention weights A of independent Gaussian scores, or of AX, to leading order in n.

    A = 11ᵀ/n + (c/√n)(G/√n), c = √(e^{s²} − 1) the √Var/mean of e^s, so that σ₂/σ₁ = 2c/√n of
    A. Of AX, X Gaussian [n, d] with n/d = r: c √(x/n), x = (1 + z)² (1 + r z)/z the edge of the
    spectrum of a product, at z = (√(1 + 8r) − 1)/(4r). Without its first part (`variant` "a_perp")
    nothing falls with n.

    Args:
        score_std: Standard deviation of the scores.
        num_tokens: n.
        per_feature: r of AX; None for A.

    Source: Nait Saada et al. 2024 (arXiv 2410.07799); edges by Marchenko and Pastur 1967 and the
    S-transform of Voiculescu 1987.
    """
    c = jnp.sqrt(jnp.expm1(jnp.square(score_std)))
    if per_feature is None:
        return 2 * c / jnp.sqrt(num_tokens)
    r = jnp.asarray(per_feature, float)
    z = (jnp.sqrt(1 + 8 * r) - 1) / (4 * r)
    return c * jnp.sqrt((1 + z) ** 2 * (1 + r * z) / z / num_tokens)
