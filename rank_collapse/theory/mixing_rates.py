"""How fast a matrix of attention mixes tokens, from its mask or its width alone.

Axis letters: n tokens.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def mask_radius(mask: Any) -> int:
    """The least number r of steps in which one token reaches all along the mask.

    A token i reaches j in a step where the mask lets j attend to i, itself only where the mask has
    (i, i); 1 for full and causal masks. Then P^r has a column without zeros.

    Args:
        mask: Bool [n, n], which keys a query may attend to.

    Raises:
        ValueError: Not a square; no token reaches all in one number of steps, as under two blocks
            that never meet or two tokens that only see each other.
    """
    step = np.asarray(mask, bool)
    if step.ndim != 2 or len(set(step.shape)) > 1:
        raise ValueError(f"a mask of shape {step.shape} is not [n, n]")
    reached = step
    most = len(step) if step.diagonal().all() else (len(step) - 1) ** 2 + 1  # Wielandt 1950
    for radius in range(1, most + 1):
        if reached.all(axis=0).any():
            return radius
        reached = (reached.astype(np.int32) @ step.astype(np.int32)) > 0
    raise ValueError(f"no token of the mask [{len(step)}, {len(step)}] reaches all")


def mask_rate_bound(smallest: Any, radius: Any, depth: Any) -> Array:
    """(1 − ε^r)^{⌊t/r⌋}: what is left of the tokens' largest difference after t layers, at most.

    Of row-stochastic weights with entries of at least ε where the mask allows, values as they are.

    Args:
        smallest: ε.
        radius: r, from `mask_radius`.
        depth: t.

    Source: Wu et al. 2024 (arXiv 2405.18781), theorem 1.
    """
    return (1 - jnp.asarray(smallest) ** radius) ** (depth // radius)


def softmax_spread(score_std: Any) -> Array:
    """√Var/mean of e^s, s Gaussian: √(e^{s²} − 1), what the weights' spectrum depends on."""
    return jnp.sqrt(jnp.expm1(jnp.square(score_std)))


def spectral_ratio(score_std: Any, num_tokens: Any, per_feature: Any = None) -> Array:
    """σ₂/σ₁ of attention weights A of independent Gaussian scores, or of AX, to leading order in n.

    A = 11ᵀ/n + (c/√n)(G/√n), c = `softmax_spread`, so that σ₂/σ₁ = 2c/√n of A. Of AX, X Gaussian
    [n, d] with n/d = r: c √(x/n), x = (1 + z)² (1 + r z)/z the edge of the spectrum of a product,
    at z = (√(1 + 8r) − 1)/(4r). Without its first part (`variant` "a_perp") nothing falls with n.

    Args:
        score_std: Standard deviation of the scores.
        num_tokens: n.
        per_feature: r of AX; None for A.

    Source: Nait Saada et al. 2024 (arXiv 2410.07799); edges by Marchenko and Pastur 1967 and the
    S-transform of Voiculescu 1987.
    """
    c = softmax_spread(score_std)
    if per_feature is None:
        return 2 * c / jnp.sqrt(num_tokens)
    r = jnp.asarray(per_feature, float)
    z = (jnp.sqrt(1 + 8 * r) - 1) / (4 * r)
    return c * jnp.sqrt((1 + z) ** 2 * (1 + r * z) / z / num_tokens)


def ssm_cosine(rho: Any, decay: Any, distance: Any) -> Array:
    """Cosine of two tokens after a state-space model M_ij = (C_i·B_j) λ^{i−j}, at initialisation.

    C and B are random projections of tokens x of length 1 whose cosines are ρ, so that
    E⟨y_i, y_k⟩ ∝ ⟨x_i, x_k⟩ Σ_jm ⟨x_j, x_m⟩² λ^{i−j+k−m}; far from the first token
        ρ' = ρ (ρ² s² + (1 − ρ²) λ^{|i−k|} v)/(ρ² s² + (1 − ρ²) v), s = 1/(1 − λ), v = 1/(1 − λ²).
    Never above ρ: without a softmax, whose weights share their sign, mixing does not align tokens.

    Args:
        rho: ρ, the cosine of any two tokens before.
        decay: λ in [0, 1), what a step keeps of the state.
        distance: |i − k| ≥ 1.

    Source: derived here; models as of Dao and Gu 2024 (arXiv 2405.21060).
    """
    rho = jnp.asarray(rho, float)
    same, other = (rho / (1 - decay)) ** 2, (1 - rho**2) / (1 - decay**2)
    return rho * (same + other * decay**distance) / (same + other)
