"""Networks and draws with residual profiles proved by ball arithmetic, for passes over pairs."""

import functools

import ball_oracle
import jax
import jax.numpy as jnp
import numpy as np

import rank_collapse as rc
from rank_collapse.theory import noise, pairs

N, D, H, DEPTH = 6, 16, 4, 5
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SKIPS = {"attention_skip": True, "mlp_skip": True, "d_ff": 2 * D}
EXISTS = np.array([1, 1, 0, 1, 1, 1], bool)
ANY_MASK = np.tril(np.ones((N, N), bool)) | np.eye(N, k=2, dtype=bool)
BIAS = np.random.default_rng(3).standard_normal((H, N, N)).astype(np.float32)
SEGMENTS = np.array([0, 0, 1, 1, 0, 1])
# fields, inputs, weight scales (one draw each), skip gains
CASES = {
    "SAN": ({}, {}, (0.4, 0.8, 1.4, 2, 2.5, 3, 3.5, 4), (0,)),
    "post-LN, skips, GELU": (
        {"norm_placement": "post", "mlp": "gelu"} | SKIPS, {}, (0.5, 1, 2, 3, 4),
        (1, 0, 1e-30, 0.3),
    ),
    "pre-RMS, skips, GeGLU, local": (
        {"norm_placement": "pre", "norm": "rms", "mlp": "geglu", "mask": "local", "window": 1}
        | SKIPS, {}, (0.5, 1, 2, 3), (0.7,),
    ),
    "rotary, causal, skip": (
        {"position": "rotary", "mask": "causal", "attention_skip": True}, {}, (0.5, 1, 2, 3),
        (0, 1e-30, 1),
    ),
    "relative, segments, bias, a mask": (
        {"position": "relative_key"}, {"segments": SEGMENTS, "bias": BIAS, "mask": ANY_MASK},
        (0.5, 1, 2, 3), (0,),
    ),
    "normalised queries, rotary": (
        {"qk_norm": "head", "position": "rotary"}, {}, (0.5, 1, 2, 3), (0,),
    ),
    "queries normalised together, causal": (
        {"qk_norm": "width", "mask": "causal"}, {}, (0.5, 1, 2, 3), (0,),
    ),
    "additive, tanh MLP": (
        {"score": "additive", "mlp": "tanh", "d_ff": D}, {}, (0.5, 1, 2), (0,),
    ),
}  # fmt: skip


@functools.cache
def drawn(case):
    """Parameters, tokens and configs of a case, one draw per weight scale, and its inputs."""
    fields, inputs, scales, gains = CASES[case]
    config = rc.TransformerConfig(depth=DEPTH, num_heads=H, d_model=D, **fields)
    keys = jax.random.split(jax.random.key(len(case)), len(scales))

    def single(key, scale, gain):
        x = jax.random.normal(jax.random.fold_in(key, 1), (N, D)) + 0.3
        return rc.init(key, config, scale, 0.1), x, config.replace(skip_gain=gain)

    scales = jnp.asarray(scales, jnp.float32)
    gains = jnp.resize(jnp.asarray(gains, jnp.float32), len(scales))
    compiled = jax.jit(jax.vmap(single), compiler_options=QUICK)
    return *jax.tree.map(np.asarray, compiled(keys, scales, gains)), inputs


@functools.cache
def proofs(case):
    params, x, config, inputs = drawn(case)
    each = [jax.tree.map(lambda a, s=s: a[s], (params, x, config)) for s in range(len(x))]
    return np.stack([ball_oracle.profile(*one, max_digits=1600, **inputs) for one in each])


def profiles(params, x, config, **inputs):
    fn = jax.vmap(lambda p, x, c: pairs.pair_profile(p, x, c, **inputs))
    return np.asarray(jax.jit(fn, compiler_options=QUICK)(params, x, config))


def right_or_refused(got, want):
    """Asserts that no number is wrong; returns which layers are given and proved."""
    seen = ~np.isnan(got) & ~np.isnan(want)
    error = np.abs(np.where(seen, got - np.where(seen, want, 0), 0))
    tolerance = np.maximum(noise.ABSOLUTE, noise.RELATIVE * np.abs(np.where(seen, want, 0)))
    np.testing.assert_array_less(error, tolerance)
    return seen
