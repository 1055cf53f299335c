"""Operations on tokens written as 1x̄ᵀ + e^s R̂: sums, norms and MLPs.

Each maps (x̄, R̂, s) to a mean token and parts of the new residual, subtracts no nearly equal
numbers, and stays right where ε = e^s underflows to 0. Attention is in `log_attention`;
`logdomain` chains them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.annotations import Leaf, Number
from rank_collapse.measures.norms import composite_norm
from rank_collapse.network import layers
from rank_collapse.network.residual import apply_gain


class LogState(struct.Struct):
    """Tokens X = 1·meanᵀ + e^log_scale · residual."""

    mean: Leaf  # Mean token [d]
    # Mantissa of the residual [n, d]; columns sum to 0, max |residual| = 1; 0 in masked rows
    residual: Leaf
    log_scale: Leaf  # Natural logarithm s of its size; −inf where the residual is 0


class LogParts(struct.Struct):
    """What a branch adds: a mean token and parts e^{s_p} R_p of a residual."""

    mean: Leaf  # [d]
    parts: Leaf  # [p, n, d]
    scales: Leaf  # s_p, natural logarithms [p]
    # Logarithm of what rounding may have put into the parts; −inf where it is nothing
    noise: Number = -jnp.inf


def log10_norm(state):
    """Compute log10 ‖e^s R̂‖_{1,∞}."""
    return (state.log_scale + jnp.log(composite_norm(state.residual))) / math.log(10)


def log10_diameter(state):
    """Compute log10 of the largest ℓ2 distance of two tokens, e^s max_{ik} |r̂_i − r̂_k|.

    Squared distances are |r̂_i|² + |r̂_k|² − 2 r̂_i·r̂_k: around the mean token the largest distance
    is at least the largest |r̂_i|, so that nothing cancels in it. Masked rows are 0, the mean token,
    which is no farther from a token than the farthest other one.
    """
    squares = jnp.sum(jnp.square(state.residual), axis=1)
    gram = state.residual @ state.residual.T
    largest = jnp.max(squares[:, None] + squares[None, :] - 2 * gram)
    return (state.log_scale + jnp.log(jnp.maximum(largest, 0)) / 2) / math.log(10)


def renormalise_parts(mean, parts, scales, keep) -> LogState:
    """Normalise tokens 1·meanᵀ + Σ_p e^{s_p} R_p to the form of `LogState`.

    Args:
        mean: [d].
        parts: R_p [p, n, d].
        scales: s_p [p].
        keep: Bool [n], the tokens that exist.
    """
    exists = keep[None, :, None]
    parts = jnp.where(exists, parts, 0)
    centers = jnp.sum(parts, axis=1) / jnp.sum(keep, dtype=parts.dtype)
    half = jnp.exp(scales / 2)[:, None]  # applied twice: e^s may overflow where parts are tiny
    mean = mean + jnp.sum(half * (half * centers), axis=0)
    parts = jnp.where(exists, parts - centers[:, None, :], 0)
    sizes = jnp.max(jnp.abs(parts), axis=(1, 2))
    scales = jnp.where(sizes == 0, -jnp.inf, scales + jnp.log(jnp.where(sizes == 0, 1, sizes)))
    top = jnp.max(scales)
    weights = jnp.exp(scales - jnp.where(top == -jnp.inf, 0, top))
    weights = weights / jnp.where(sizes == 0, 1, sizes)
    residual = jnp.einsum("p,pnd->nd", weights, parts)
    # rounding has left a mean of the order of the dtype's epsilon
    center = jnp.sum(residual, axis=0) / jnp.sum(keep, dtype=parts.dtype)
    residual = jnp.where(exists[0], residual - center[None, :], 0)
    size = jnp.max(jnp.abs(residual))
    safe = jnp.where(size == 0, 1, size)
    return LogState(mean, residual / safe, jnp.where(size == 0, -jnp.inf, top + jnp.log(safe)))


def around_mean(x, keep) -> LogState:
    """Split tokens [n, d] into their mean and a residual; those that do not exist are 0."""
    x = jnp.where(keep[:, None], x, 0)
    center = jnp.sum(x, axis=0) / jnp.sum(keep, dtype=x.dtype)
    return renormalise_parts(center, (x - center[None, :])[None], jnp.zeros(1, x.dtype), keep)


def add_branch(spec, state, part, keep) -> LogState:
    """Compute γ part + λ state·[skip] of a `ResidualSpec`; NaN where a tenth of it is noise.

    Args:
        spec: Specification of the sublayer.
        state: The stream before it.
        part: Output of the branch, `LogParts`.
        keep: Bool [n], the tokens that exist.
    """
    mean, parts = apply_gain(spec.branch_gain, part.mean), apply_gain(spec.branch_gain, part.parts)
    scales = part.scales
    if spec.skip:
        mean = mean + apply_gain(spec.skip_gain, state.mean)
        parts = jnp.concatenate([parts, apply_gain(spec.skip_gain, state.residual)[None]])
        scales = jnp.append(scales, state.log_scale)
    noise = part.noise + jnp.log(jnp.max(jnp.abs(spec.branch_gain)))
    return _mask_noise(renormalise_parts(mean, parts, scales, keep), noise)


def _mask_noise(state, noise):
    """Return the state, its scale NaN where `noise`, a logarithm, is a tenth of it or more."""
    is_lost = (noise > -jnp.inf) & (noise > state.log_scale - jnp.log(10.0))
    return state.replace(log_scale=jnp.where(is_lost, jnp.nan, state.log_scale))


def apply_norm(spec, state, keep):
    """Apply the spec's norm N: the mean token becomes N(x̄), the residual N(x_i) − N(x̄).

    The residual comes from the change of σ, not from a difference of outputs.

    Args:
        spec: Specification of the norm.
        state: Input of the norm.
        keep: Bool [n], the tokens that exist.
    """
    u, r = state.mean, state.residual
    if spec.norm_kind == "layer":
        u, r = u - jnp.mean(u), r - jnp.mean(r, axis=1, keepdims=True)
    mean, residual = normalise_around(u, r, jnp.exp(state.log_scale), spec.eps)
    if spec.norm is not None:
        mean, residual = mean * spec.norm.gain, residual * spec.norm.gain[None, :]
        if spec.norm.bias is not None:
            mean = mean + spec.norm.bias
    return renormalise_parts(mean, residual[None], state.log_scale[None], keep)


def normalise_around(u, r, eps, norm_eps):
    """Divide u by σ_0 and v_i = u + ε r_i by σ_i; returns u/σ_0 and (v_i/σ_i − u/σ_0)/ε.

    σ² = mean v² + norm_eps, and

    (v_i/σ_i − u/σ_0)/ε = r_i/σ_i − u (σ_i² − σ_0²)/(ε σ_i σ_0 (σ_i + σ_0)).

    Args:
        u: Mean token [d].
        r: Residuals r_i [n, d].
        eps: ε.
        norm_eps: ε in the norm.
    """
    twice = (2 * r @ u + eps * jnp.sum(jnp.square(r), axis=1)) / u.shape[0]  # (σ_i² − σ_0²)/ε
    sigma_0 = jnp.sqrt(jnp.mean(jnp.square(u)) + norm_eps)
    sigma = jnp.sqrt(
        jnp.mean(jnp.square(u[None, :] + eps * r), axis=1) + norm_eps
    )  # positive where σ_0² + ε·twice could round below 0
    change = twice / (sigma * sigma_0 * (sigma + sigma_0))
    return u / sigma_0, r / sigma[:, None] - change[:, None] * u[None, :]


def normalise_branch(spec, part, keep) -> LogParts:
    """Apply the norm to the output of a branch; NaN where a tenth of it is noise."""
    state = _mask_noise(renormalise_parts(part.mean, part.parts, part.scales, keep), part.noise)
    state = apply_norm(spec, state, keep)
    return LogParts(state.mean, state.residual[None], state.log_scale[None])


def mlp_parts(params, state, kind) -> LogParts:
    """Compute an MLP; its residual from divided differences of φ.

    Args:
        params: Parameters of the MLP.
        state: Input of the MLP.
        kind: `TransformerConfig.mlp`.
    """
    eps = jnp.exp(state.log_scale)
    z, u = state.mean @ params.w_in + params.b_in, state.residual @ params.w_in
    if kind in layers.GATED:
        gate = state.mean @ params.w_gate + params.b_gate
        change = state.residual @ params.w_gate
        phi = layers.get_activation(kind).fn
        factor = phi(gate[None, :] + eps * change)
        difference = factor * u + z[None, :] * _divided_difference(kind, gate, change, eps)
        value = phi(gate) * z
    else:
        difference = _divided_difference(kind, z, u, eps)
        value = layers.get_activation(kind).fn(z)
    mean = value @ params.w_out + params.b_out
    noise = -jnp.inf
    if layers.GATED.get(kind, kind) not in ("identity", "relu"):  # features may underflow
        underflow = math.log(jnp.finfo(u.dtype).tiny) + jnp.log(jnp.max(jnp.abs(params.w_out)))
        noise = state.log_scale + underflow + jnp.log(jnp.maximum(1, jnp.max(jnp.abs(u))))
    return LogParts(mean, (difference @ params.w_out)[None], state.log_scale[None], noise)


def _quadrature_nodes(dtype):
    """Returns Gauss-Legendre (nodes, weights) on [0, 1].

    Over a step of 1 from |z| ≤ 10 the mean of gelu's φ' is then known to 1e-12 of itself in
    float64, to 1e-8 in others.
    """
    nodes, weights = np.polynomial.legendre.leggauss(10 if dtype == jnp.float64 else 8)
    return jnp.asarray((nodes + 1) / 2, dtype), jnp.asarray(weights / 2, dtype)


def _divided_difference(kind, z, u, eps):
    """Compute (φ(z + εu) − φ(z))/ε without cancellation, also where ε is 0 and where φ saturates.

    For tanh it is sinh(εu)/(ε cosh(z + εu) cosh z). Other activations are φ(z) = z g(z) with a gate
    g: over long steps |εu| > 1 the difference is u g(z + εu) + z (g(z + εu) − g(z))/ε, over short
    ones u times a mean of φ' between z and z + εu, by quadrature.

    Args:
        kind: Name of the activation φ.
        z: [f], the same for all tokens.
        u: [n, f].
        eps: ε.

    Returns:
        [n, f].
    """
    name = layers.GATED.get(kind, kind)
    z = z[None, :]
    if name == "identity":
        return u
    if name == "relu":  # piecewise linear: exact by cases
        ratio = jnp.where(eps == 0, jnp.sign(z) * jnp.inf, z / jnp.where(eps == 0, 1, eps))
        ratio = jnp.where(z == 0, 0, ratio)
        near = jnp.clip(ratio, -jnp.abs(u), jnp.abs(u))
        return jnp.where(
            jnp.abs(ratio) > jnp.abs(u),
            jnp.where(z > 0, u, 0),
            jax.nn.relu(near + u) - jax.nn.relu(near),
        )
    step = eps * u
    if name == "tanh":
        return _tanh_difference(z, u, step)
    large = jnp.abs(step) > 1

    def gate(z):
        if name == "gelu_tanh":  # (1 + tanh y)/2 without its cancellation
            return jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
        return layers.get_activation(kind).gate(z)

    def phi(z):
        return z * gate(z)

    def add(slope, node_and_weight):
        node, weight = node_and_weight
        at = z + jnp.where(large, 0, step) * node
        return slope + weight * jax.jvp(phi, (at,), (jnp.ones_like(at),))[1], None

    # A loop: copies of φ' take a sixth of the time in which the networks' programs compile.
    slope, _ = jax.lax.scan(add, jnp.zeros_like(u), _quadrature_nodes(u.dtype))
    gate_part = z * (gate(z + step) - gate(z)) / jnp.where(eps == 0, 1, eps)
    return jnp.where(large, u * gate(z + step) + gate_part, u * slope)


def _tanh_difference(z, u, step):
    """Compute u sinh(s)/(s cosh(z + s) cosh z) for s = step, without overflow."""

    def log_cosh(x):
        return jnp.abs(x) + jnp.log1p(jnp.exp(-2 * jnp.abs(x))) - math.log(2.0)

    twice = 2 * jnp.abs(step)
    tiny = twice < 1e-6  # (1 − e^{−t})/t is 1 − t/2
    ratio = jnp.where(tiny, 1 - twice / 2, -jnp.expm1(-twice) / jnp.where(tiny, 1, twice))
    return u * ratio * jnp.exp(jnp.abs(step) - log_cosh(z) - log_cosh(z + step))
