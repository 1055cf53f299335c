"""Residuals far below what floating point can hold: tokens as 1x̄ᵀ + e^s R̂.

The residual of pure attention shrinks like its cube in every layer; float32 sees two or three
layers of that, float64 not many more. Here the mean token x̄, a mantissa R̂ (columns that sum to
0, largest entry 1) and a log scale s are carried through every operation of the network, each in
a form that subtracts no nearly equal numbers and stays right where ε = e^s underflows to 0.

Axis letters: n tokens (queries), m keys, d width, h heads, k per-head query/key width, l layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.transformer import input_states, make_context, per_layer, scan_layers
from rank_collapse.theory import log_operations as ops


@struct.dataclass
class LogTrace:
    """What the bounds need of every layer; residuals as log10 ‖.‖_{1,∞}.

    Attributes:
        profile: Of X^0 .. X^L, [L + 1].
        inputs: LogState of what each layer's attention looks at, with a leading layer axis.
        heads: Of P_h X W_h, less three times the log scale of the layer's input, [L, h]: the
            difference is what float32 can hold in deep layers.
        branches: Of SA(X), before the branch gain, in the same way, [L].
        mask: Bool [h or 1, n or 1, m] of the scores, or None.
    """

    profile: Any
    inputs: Any
    heads: Any
    branches: Any
    mask: Any


def log_residual_profile(
    params: Any,
    x: Any,
    config: TransformerConfig,
    mask: Any = None,
    *,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> Float[Array, "l"]:
    """log10 ‖res(X^l)‖_{1,∞} for l = 0..L, however small, res taken around the mean token.

    With ε = e^s, g = ε R̂W_K(x̄W_Q + b_Q)ᵀ/√k and δ = R̂W_Q(R̂W_K)ᵀ/√k, attention weights are
    softmax(g + ε²δ) = q + ε²E, E_ij = q_j (M_ij − Σ_j q_j M_ij)/(1 + ε² Σ_j q_j M_ij),
    M = expm1(ε²δ)/ε², and the new residual is ε³ Σ_h E R̂ W_h: s becomes 3s + a constant, the
    doubly exponential rate. Whatever makes rows differ by itself (a causal or local mask, a
    position bias, rotary or relative positions) gives each row its own q and adds
    ε (Q − 1q_refᵀ) R̂ W_h: an exponential rate. Skips, norms, MLPs, gains (0 included) and the
    temperature are treated exactly too.

    Arithmetic is that of x and the parameters, at least float32. The log scale has a relative
    accuracy of about 1e-6 in float32; where large weights make scores of size S and all rows look
    at one key, the residual is e^−(difference of scores), its logarithm has their error, 1e-7 S.
    It reaches 3^80, near float32's largest number: −inf after that, and where a residual is 0. The
    mean token is an ordinary array: a network whose mean token overflows gives NaN. R̂ has one
    scale: where weights are so large that tokens fall into clusters, distances within a cluster
    are kept relative to those between clusters only. NaN from the layer on whose residual is seen
    to hang on such distances alone; with several clusters in clusters it may go unseen.

    Args:
        params: Parameters of the network.
        x: Hidden states [n, d], or what `config.embedding` takes.
        config: The network; `skip_gain`, `branch_gain` and `temperature` may be traced.
        mask: Bool [n] (which tokens exist; the others are left out of the residual), [n, n] or
            [h, n, n].
        bias: Float [h, n, n] added to the scores.
        segments: Int [n], for relative attention.
        positions: Int [n], for rotary positions.

    Returns:
        [L + 1] decimal logarithms; jit at the outside, vmap over seeds.

    Raises:
        ValueError: Cross-attention, additive attention with rotary positions, or inputs of the
            wrong shape.

    Source: the rate is that of Dong et al. 2021, theorems 2.2 and 2.3.
    """
    trace = log_trace(params, x, config, mask, bias=bias, segments=segments, positions=positions)
    return trace.profile


def log_trace(
    params: Any,
    x: Any,
    config: TransformerConfig,
    mask: Any = None,
    *,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
) -> LogTrace:
    """The pass behind `log_residual_profile`, with each layer's attention input and branches.

    Args, Raises: See `log_residual_profile`.
    """
    if config.cross_attention:
        raise ValueError("cross_attention=True has a second input: no residual profile in logs")
    if config.score == "additive" and config.position == "rotary":
        raise ValueError("score='additive' with position='rotary' has no residual profile in logs")
    x = input_states(params, x, config, segments=segments, positions=positions)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    for leaf in jax.tree.leaves(params.layers):
        dtype = jnp.promote_types(dtype, leaf.dtype)
    x, params = x.astype(dtype), jax.tree.map(lambda a: a.astype(dtype), params)
    mask = None if mask is None else jnp.asarray(mask)
    context = make_context(
        params, config, x.shape[0], mask=mask, bias=bias, segments=segments, positions=positions
    )
    if mask is not None and mask.ndim == 1:
        keep = mask
        x = jnp.where(keep[:, None], x, 0)
    else:
        keep = jnp.ones(x.shape[0], bool)

    with jax.default_matmul_precision("highest"):
        center = jnp.sum(x, axis=0) / jnp.sum(keep)
        start = ops.settle(center, (x - center[None, :])[None], jnp.zeros(1, dtype), keep)

        def body(state, step):
            layer, gains = step
            state, seen, heads, branch = _layer(layer, state, config, context, gains, keep)
            return state, (ops.log10_norm(state), seen, heads, branch)

        _, out = scan_layers(body, start, params, config, per_layer(config, dtype))
        profile, inputs, heads, branches = out
        profile = jnp.concatenate([ops.log10_norm(start)[None], profile])
    return LogTrace(profile, inputs, heads, branches, ops.three_axes(context.mask))


def local_rate(profile: Any) -> Float[Array, "*s k"]:
    """log‖res(X^{l+1})‖ / log‖res(X^l)‖ for l = 0..L−1; it tends to 3 in pure attention.

    Means little in the first layers, where the logarithm passes 0.

    Args:
        profile: Logarithms [..., L + 1] to any base.
    """
    profile = jnp.asarray(profile)
    return profile[..., 1:] / profile[..., :-1]


def _layer(params, state, config, context, gains, keep):
    """One layer's state, its attention's input, and residuals of heads and branch over e^{3s}."""

    def close(norm_params, mean, parts, scales, skip, state, noise=-jnp.inf):
        mean, parts = gains["branch_gain"] * mean, gains["branch_gain"] * parts
        if skip:
            mean = mean + gains["skip_gain"] * state.mean
            parts = jnp.concatenate([parts, gains["skip_gain"] * state.rest[None]])
            scales = jnp.append(scales, state.log_scale)
        out = ops.settle(mean, parts, scales, keep)
        noise = noise + jnp.log(jnp.abs(gains["branch_gain"]))
        lost = (noise > -jnp.inf) & (noise > out.log_scale - jnp.log(10.0))
        out = out.replace(log_scale=jnp.where(lost, jnp.nan, out.log_scale))
        return ops.norm(norm_params, out, config, keep) if config.norm_placement == "post" else out

    def enter(norm_params, state):
        if config.norm_placement != "pre":
            return state
        return ops.norm(norm_params, state, config, keep)

    seen = enter(params.attention_norm, state)
    mean, per_head, noise = ops.attention(
        params.attention, seen, config, context, gains["temperature"], keep
    )
    # log10 ‖.‖ less 3 s/ln 10, without forming either of the large numbers
    over_cube = [t if p == 3 else (p - 3) * seen.log_scale + t for _, p, t in per_head]
    over_cube = jnp.stack(over_cube)  # [kinds of part, h]
    parts = jnp.stack([rest for rest, _, _ in per_head])
    nothing = jnp.zeros_like(mean)

    def size(parts, scales):
        return ops.log10_norm(ops.settle(nothing, parts, scales, keep))

    heads = jax.vmap(size, in_axes=1)(parts, over_cube)
    flat = parts.reshape((-1, *parts.shape[2:]))
    branch = size(flat, over_cube.reshape(-1))
    scales = jnp.stack([p * seen.log_scale + t for _, p, t in per_head]).reshape(-1)
    state = close(params.attention_norm, mean, flat, scales, config.attention_skip, state, noise)
    if config.mlp != "none":
        before = enter(params.mlp_norm, state)
        mean, rest = ops.mlp(params.mlp, before, config.mlp)
        scales = before.log_scale[None]
        state = close(params.mlp_norm, mean, rest[None], scales, config.mlp_skip, state)
    return state, seen, heads, branch
