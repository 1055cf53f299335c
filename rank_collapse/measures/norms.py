"""Matrix norms of one array of tokens [n, d], with an optional mask of tokens that exist.

Axis letters: n tokens, d width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.measures import decompositions
from rank_collapse.network.entry import as_mask

NORMS = ("composite", "one", "inf", "frobenius", "spectral", "max")


def as_tokens(x: Any, mask: Any = None) -> tuple[Float[Array, "n d"], Any]:
    """Any framework's [n, d] array as a JAX array of at least float32, and its mask as Bool [n].

    Masked rows become zeros. Arrays that are not traced are also checked for values that are not
    finite; inside jit and vmap these propagate instead.

    Raises:
        ValueError: Not a matrix, no token, not finite, or a mask of another length.
    """
    x = as_array(x)
    if x.ndim != 2:
        raise ValueError(f"x of shape {x.shape} is not [n, d]; use jax.vmap for further axes")
    if 0 in x.shape:
        raise ValueError(f"x of shape {x.shape} has no token or no feature")
    if jnp.iscomplexobj(x):
        raise ValueError(f"x of dtype {x.dtype} is not real")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if mask is not None:
        mask = as_array(mask)
        if mask.shape != x.shape[:1]:
            raise ValueError(f"mask of shape {mask.shape} does not fit {x.shape[0]} tokens")
        mask = as_mask(mask, "mask")
        if not isinstance(mask, jax.core.Tracer) and not bool(mask.any()):
            raise ValueError(f"mask of shape {mask.shape} leaves no token")
        x = jnp.where(mask[:, None], x, 0)
    if not isinstance(x, jax.core.Tracer):
        bad = int(jnp.sum(~jnp.isfinite(x)))
        if bad:
            raise ValueError(f"x of shape {x.shape} holds {bad} values that are not finite")
    return x, mask


def in_own_precision(measure: Callable) -> Callable:
    """Decorator: float64 arrays of numpy or torch are measured in float64.

    JAX would cut them to float32 unless jax_enable_x64 is set, which a residual far below its
    tokens does not survive. JAX arrays and traced values keep their own precision.
    """

    @functools.wraps(measure)
    def measured(x, *args, **options):
        double = str(getattr(x, "dtype", "")).endswith("float64") and not isinstance(x, jax.Array)
        if not double:
            return measure(x, *args, **options)
        with jax.enable_x64(True):
            return measure(x, *args, **options)

    return measured


def root(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """√x with derivative 0 at 0, where tokens have collapsed, instead of NaN."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def as_array(x: Any) -> Array:
    """Any framework's array as a JAX array."""
    if hasattr(x, "detach"):  # torch: autograd graphs and bfloat16 have no numpy form
        x = x.detach().cpu()
        if str(x.dtype) == "torch.bfloat16":
            x = x.float()
        x = np.array(x.numpy())
    return jnp.asarray(x)


def as_floats(x: Any) -> Array:
    """`as_array` in float32 at least."""
    x = as_array(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def num_tokens(x: Float[Array, "n d"], mask: Any = None) -> Float[Array, ""]:
    """Number of tokens that exist, as a float (traced where the mask is)."""
    count = x.shape[0] if mask is None else jnp.sum(mask)
    return jnp.asarray(count, x.dtype)


@in_own_precision
def norm_1(x: Any, *, mask: Any = None) -> Float[Array, ""]:
    """‖X‖_1 = max_j Σ_i |X_ij|, the largest column sum.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.
    """
    x, _ = as_tokens(x, mask)
    return jnp.max(jnp.sum(jnp.abs(x), axis=0))


@in_own_precision
def norm_inf(x: Any, *, mask: Any = None) -> Float[Array, ""]:
    """‖X‖_∞ = max_i Σ_j |X_ij|, the largest row sum.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.
    """
    x, _ = as_tokens(x, mask)
    return jnp.max(jnp.sum(jnp.abs(x), axis=1))


@in_own_precision
def composite_norm(x: Any, *, mask: Any = None) -> Float[Array, ""]:
    """‖X‖_{1,∞} = √(‖X‖_1 ‖X‖_∞) (Dong et al. 2021, section 2).

    Not a norm: the triangle inequality fails, as the authors say.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: Not a matrix, no token, not finite (where x is not traced), or a wrong mask.
    """
    x, _ = as_tokens(x, mask)
    return root(norm_1(x)) * root(norm_inf(x))  # the product itself could overflow


@in_own_precision
def singular_values(x: Any, *, mask: Any = None, method: str = "svd") -> Float[Array, "r"]:
    """Singular values, largest first; masked rows only add zeros.

    Args:
        x: Tokens [n, d].
        mask: Bool [n], True for tokens that exist; None for all.
        method: "svd", or "gram" for the square roots of the eigenvalues of the smaller of XXᵀ and
            XᵀX, which loses what lies below √ε σ_1 (3e-4 σ_1 in float32). Of 24 matrices
            [128, 256] on a CPU it took 2.5 s of CPU time, the SVD 1.8: time it where you are.

    Raises:
        ValueError: Unknown method; see also `composite_norm`.
    """
    if method not in ("svd", "gram"):
        raise ValueError(f"method={method!r} is not one of ('svd', 'gram')")
    x, _ = as_tokens(x, mask)
    scaled, scale = _unit_scale(x)
    if method == "svd":
        return scale * decompositions.svdvals(scaled)
    short = scaled if scaled.shape[0] <= scaled.shape[1] else scaled.T
    gram = jnp.matmul(short, short.T, precision="highest")
    return scale * root(jnp.maximum(decompositions.eigvalsh(gram)[::-1], 0))


@in_own_precision
def matrix_norm(x: Any, norm: str = "composite", *, mask: Any = None) -> Float[Array, ""]:
    """A norm by name.

    Args:
        x: Tokens [n, d].
        norm: "composite" ‖.‖_{1,∞}, "one" largest column sum, "inf" largest row sum, "frobenius",
            "spectral" largest singular value, "max" largest |entry|.
        mask: Bool [n], True for tokens that exist; None for all.

    Raises:
        ValueError: Unknown norm; see also `composite_norm`.
    """
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is not one of {NORMS}")
    if norm == "composite":
        return composite_norm(x, mask=mask)
    if norm == "one":
        return norm_1(x, mask=mask)
    if norm == "inf":
        return norm_inf(x, mask=mask)
    if norm == "spectral":
        return singular_values(x, mask=mask)[0]
    x, _ = as_tokens(x, mask)
    if norm == "max":
        return jnp.max(jnp.abs(x))
    scaled, scale = _unit_scale(x)
    return scale * root(jnp.sum(jnp.square(scaled)))


def _unit_scale(x):
    """x divided by its largest entry: squares of a collapsed residual would underflow."""
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(x)))
    return x / jnp.where(scale == 0, 1, scale), jnp.where(scale == 0, 1, scale)
