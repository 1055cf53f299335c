"""Operations that few models have: each passes, weighs or bends the paths of a state, or is frozen.

All are in one program.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.scipy import special

from rank_collapse.paths.traced.primitives import CURES, KERNELS, find_cure
from tests.oracles.function_paths import contributions, ranks_of_others as ranks_of_others
from tests.oracles.jax_layers import D, draw, tokens
from tests.support.closeness import assert_close

B, V = draw(80, D, D), draw(81, D, D)
TURNED = np.linspace(0.5, 2, D)


def split_and_subtract(h):
    first, second = jnp.split(h, 2, axis=-1)
    return first - 2 * second


LINEAR = {
    "split": split_and_subtract,
    "rev": lambda h: jnp.flip(h, 1) * TURNED,
    "reduce_precision": lambda h: lax.reduce_precision(h, 11, 52),
    "squeeze": lambda h: h[:, None].squeeze(1),
    "dynamic_slice": lambda h: lax.dynamic_slice(h, (1, 2), (2, 3)),
    "dynamic_update_slice": lambda h: lax.dynamic_update_slice(h, 3 * h[:2, :2], (1, 2)),
    "pad": lambda h: lax.pad(h, 0.0, ((1, 0, 0), (0, -2, 1))),
    "tile": lambda h: jnp.tile(h, (2, 1)),
    "gather": lambda h: h[np.asarray([3, 0, 3])],
    "scatter": lambda h: h.at[1].set(h[0]),
    "scatter-add": lambda h: h.at[1].add(2 * h[0]),
    "reduce_window_sum": lambda h: lax.reduce_window(h, 0.0, lax.add, (2, 3), (1, 2), "VALID"),
    "cumsum, reversed": lambda h: lax.cumsum(h, axis=0, reverse=True),
    "complex, imag": lambda h: lax.imag(lax.complex(h, 2 * h)),
    "conj, real": lambda h: lax.real(lax.conj(lax.complex(h, 2 * h))),
    "fft": lambda h: jnp.fft.irfft(jnp.fft.rfft(h) * (1 + 2j)),
    "sub": lambda h: 2 * h[:1] - h[1:],
    "conv": lambda h: jnp.convolve(h[0], TURNED),
}

# Of a state h, the paths of f(h)/h times h.
BENT = {
    "cbrt": jnp.cbrt,
    "ceil": jnp.ceil,
    "floor": jnp.floor,
    "tan": jnp.tan,
    "asin": lambda h: jnp.arcsin(h / 20),
    "acos": lambda h: jnp.arccos(h / 20),
    "sinh": jnp.sinh,
    "asinh": jnp.arcsinh,
    "acosh": lambda h: jnp.arccosh(1 + h * h),
    "atanh": lambda h: jnp.arctanh(h / 20),
    "lgamma": lambda h: special.gammaln(h + 30),
    "digamma": lambda h: special.digamma(h + 30),
    "erf_inv": lambda h: special.erfinv(h / 20),
    "erfc": special.erfc,
    "log1p": lambda h: jnp.log1p(h * h),
    "exp2 minus 1": lambda h: jnp.exp2(h) - 1,
    "atan2": lambda h: jnp.arctan2(h, 3.0),
}

# What multiplies another state is frozen.
WEIGHTS = {
    "eq": lambda h: jnp.where(h == h[:1], 2.0, 3.0),
    "le": lambda h: (h <= h[:1]) * 1.0,
    "is_finite": lambda h: jnp.isfinite(h) * 2.0,
    "not, or": lambda h: ~((h > 1) | (h < -1)),
    "xor": lambda h: (h > 0) ^ (h > h[:1]),
    "argmin": lambda h: jnp.argmin(h, 1, keepdims=True),
    "cummax": lambda h: lax.cummax(h, axis=1),
    "cummin": lambda h: lax.cummin(h, axis=1),
    "cumprod": lambda h: lax.cumprod(h, axis=1),
    "cumlogsumexp": lambda h: lax.cumlogsumexp(h, axis=1),
    "reduce_and": lambda h: jnp.all(h > -1, 1, keepdims=True),
    "reduce_or": lambda h: jnp.any(h > 1, 1, keepdims=True),
    "reduce_prod": lambda h: jnp.prod(h, 1, keepdims=True),
    "reduce_min": lambda h: jnp.min(h, 1, keepdims=True),
    "reduce_window_max": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
    "scatter-max": lambda h: h.at[0].max(h[1]),
    "scatter-min": lambda h: h.at[0].min(h[1]),
    "scatter-mul": lambda h: h.at[0].multiply(h[1]),
    "top_k": lambda h: lax.top_k(h, D)[0],
    "exp2": jnp.exp2,
}


def test_every_operation_passes_weighs_or_bends(x64):
    def fn(x):
        h = x + checkpoint_name(x @ B, "attn")
        passed = [f(h) for f in (*LINEAR.values(), *BENT.values())]
        return jnp.concatenate(
            [jnp.ravel(a) for a in (*passed, *(f(h) * (h @ V) for f in WEIGHTS.values()))]
        )

    @jax.jit
    def compute_by_hand(x, part):
        h = x + x @ B
        passed = [f(part) for f in LINEAR.values()] + [f(h) / h * part for f in BENT.values()]
        return [*passed, *(f(h) * (part @ V) for f in WEIGHTS.values())]

    x = tokens()
    for part, sums in zip((x, x @ B), contributions(fn, x, "attn").by_length, strict=True):
        wanted = jax.device_get(compute_by_hand(x, part))
        ends = np.cumsum([array.size for array in wanted])
        assert len(sums) == ends[-1]
        flat = np.split(np.asarray(sums), ends[:-1])
        for name, ours, array in zip([*LINEAR, *BENT, *WEIGHTS], flat, wanted, strict=True):
            assert_close(ours, array.ravel(), atol=1e-11, err_msg=name)


def test_every_fused_kernel_has_the_cure_of_kernels():
    names = ("pallas_call", "dot_product_attention_fwd", "cudnn_attention", "triton_kernel_call")
    names += ("mosaic_gpu", "ffi_call", "custom_call")
    assert len(names) == len(KERNELS)
    for name in names:
        assert "jax.nn.dot_product_attention(..., implementation=" in find_cure(name)
    assert "use jax.lax.scan or a fori_loop with constant bounds" in find_cure("while")
    assert find_cure("eigh") == CURES["default"]
