"""The kernel of tokens ⟨x_i, x_j⟩/d under random weights: attention, norms, MLPs, and updates of W.

Over independent weights of mean 0 the kernel of a layer's output is a function of that of its
input (Poole et al. 2016; for attention Noci et al. 2022), exactly so as d grows. Kept as variances
and distances of tokens, so that 1 − cosine is known down to 1e-38, and beside them how far tokens
move when the weights do.

Axis letters: n tokens (queries), m keys, d width, h heads, k degrees of Hermite polynomials.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.annotations import Leaf, Number
from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.residual import ResidualSpec
from rank_collapse.theory.score_overlap import DEGREE, compute_powers, hermite_table, overlap_ratios

# Variances of a row's scores beyond which nothing is expected of them: in the mean, and their
# standard deviation over keys, as of tokens of unequal length.
LARGEST_VARIANCE, MOST_UNEVEN = 36.0, 1.0


class TokenKernel(struct.Struct):
    """What is expected of tokens over the weights, to leading order in 1/d."""

    variance: Leaf  # [n], v_i = E|x_i|²/d
    distance: Leaf  # [n, n], u_ij = E|x_i − x_j|²/2d
    # [n, n], E⟨δx_i, δx_j⟩/d of the change δx that updates of the weights make
    change: Leaf

    @property
    def covariance(self) -> Leaf:
        """Returns [n, n], E⟨x_i, x_j⟩/d."""
        v = self.variance
        return 0.5 * (v[..., :, None] + v[..., None, :]) - self.distance

    def plus(self, common: Number) -> "TokenKernel":
        """Add one vector of mean square `common` to all tokens."""
        return self.replace(variance=self.variance + common)

    def scaled(self, gain: Number) -> "TokenKernel":
        """Multiply each part by `gain`."""
        return jax.tree.map(lambda a: gain * a, self)


def measure_kernel(x: Float[Array, "n d"]) -> TokenKernel:
    """Compute the kernel of given tokens [n, d], which do not move."""
    square = jnp.mean(jnp.square(x), axis=1)  # [n]
    unit = x - jnp.mean(x, axis=0, keepdims=True)  # distances do not see the mean token
    squares = jnp.mean(jnp.square(unit), axis=1)
    product = jnp.einsum("nd,md->nm", unit, unit) / x.shape[1]  # [n, n]
    distance = jnp.maximum(0.5 * (squares[:, None] + squares[None, :]) - product, 0)
    distance = jnp.where(jnp.eye(len(x), dtype=bool), 0, distance)
    return TokenKernel(square, distance, jnp.zeros_like(distance))


def from_covariance(k: Float[Array, "n n"], change: Float[Array, "n n"]) -> TokenKernel:
    """Returns a kernel from E⟨x_i, x_j⟩/d and the change, [n, n] each."""
    v = jnp.diag(k)
    return TokenKernel(v, 0.5 * (v[:, None] + v[None, :]) - k, change)


def weight_gain(w: Float[Array, "..."], fan_in: int) -> Array:
    """Compute fan-in · mean square of a matrix, the factor by which it multiplies the kernel."""
    return fan_in * jnp.mean(jnp.square(w))


def normalise_kernel(spec: ResidualSpec, state: TokenKernel) -> TokenKernel:
    """Divide tokens by the roots s_i of their mean squares v_i + eps, in a kernel of expected
    products.

    Tokens that differ in length only become equal, so distances u between tokens fall by this part:

    u' = u/(s_i s_j) + ½ (1/s_i − 1/s_j)(v_i/s_i − v_j/s_j), s² = v + eps. The mean over features,
    which LayerNorm takes away, and a change along x_i itself are 1/d of the whole and left out.

    Args:
        spec: Specification of the norm.
        state: Kernel of the input.
    """
    s = jnp.sqrt(state.variance + spec.eps)
    pair = s[:, None] * s[None, :]  # [n, n]
    inverse, length = 1 / s, state.variance / s
    lengths = (inverse[:, None] - inverse[None, :]) * (length[:, None] - length[None, :])  # [n, n]
    out = TokenKernel(
        state.variance / jnp.square(s), state.distance / pair + 0.5 * lengths, state.change / pair
    )
    if spec.norm is None:
        return out
    out = out.scaled(jnp.mean(jnp.square(spec.norm.gain)))
    return out if spec.norm.bias is None else out.plus(jnp.mean(jnp.square(spec.norm.bias)))


def add_kernels(spec: ResidualSpec, state: TokenKernel, part: TokenKernel) -> TokenKernel:
    """Compute γ² part + λ² state·[skip]: a branch's last matrix makes it independent of the stream.

    Args:
        spec: Specification of the sublayer.
        state: Kernel of the stream before it.
        part: Kernel of what its branch adds.
    """
    total = part.scaled(jnp.mean(jnp.square(spec.branch_gain)))
    if not spec.skip:
        return total
    skip = state.scaled(jnp.mean(jnp.square(spec.skip_gain)))
    return jax.tree.map(jnp.add, skip, total)


def attention_kernel(
    params: AttentionParams,
    queries: TokenKernel,
    keys: TokenKernel,
    weights: Float[Array, "h n m"],
    config: TransformerConfig,
    temperature: Number,
    sizes: Mapping[str, Number],
) -> TokenKernel:
    """Compute the kernel of Σ_h P_h y W_V W_O.

    Given P it is g · mean_h P_h K P_hᵀ, with g the gains of W_V and W_O. Scores are Gaussian with
    Cov(s_ij, s_km) = b K_ik K_jm, with b the gains of W_Q and W_K. Let p be the weights of equal
    tokens. To second order around them P = p (1 + s − p·s) + D, and the scores add
        b K_ik T_ik(K, K) + (D K pᵀ + p K Dᵀ)_ik,
        T_ik(A, B) = Σ_jm p_ij p_km Ã_jm B_jm,
        D_ij = ½ b p_ij K_ii (K̃_jj − Σ_l p_il K̃_ll).
    Ã is A centred by p_i along j and by p_k along m. D is the mean of P's second order. It is 0
    where all keys are as far from the mean key.

    The exact law is known for tokens of equal length and cosine. What the scores add is multiplied
    by its ratio to the second order: `score_overlap.overlap_ratios` of each row's variance of
    scores and number of keys 1/Σ_j p_ij². So it is exact for such tokens, and of second order in b
    for others; see `score_noise`.

    An update changes scores by
        Cov = b ((D_ik + (e_Q + e_K) K_ik) K_jm + K_ik D_jm),
    with D here the change of the tokens and e the squared relative sizes of updates. The part of
    W_Q and W_K in the output's change falls with T ~ (1 − ρ)². That of W_V and W_O does not.

    Args:
        params: Parameters of the layer; only mean squares of matrices are read.
        queries, keys: Kernels of the tokens of queries and of keys.
        weights: P_h of equal tokens.
        sizes: Squared relative sizes of updates of "w_q", "w_k", "w_v", "w_o".
    """
    d, k = params.w_q.shape[-2:]
    h, v = params.w_o.shape[:2]
    gain = weight_gain(params.w_v, params.w_v.shape[1]) * weight_gain(params.w_o, h * v)
    score = (1 if config.scale_scores else k) / jnp.square(temperature)
    if params.q_norm is None:
        score = score * weight_gain(params.w_q, d) * weight_gain(params.w_k, params.w_k.shape[1])
    else:  # queries and keys of one length, whatever the weights and the tokens
        score = score * jnp.mean(jnp.square(params.q_norm)) * jnp.mean(jnp.square(params.k_norm))
        score = score / (jnp.mean(queries.variance) * jnp.mean(keys.variance))
    u, key_change, query_covariance = keys.distance, keys.change, queries.covariance

    def head_kernel(p):
        """Computes one head's kernel for its weights p [n, m].

        Returns:
            (the kernel, the spread of scores, the response to updates), the last two with their
            corrections for weights that are not equal.
        """
        mixed_distance = p @ u @ p.T  # [n, n]: p is [n, m], u [m, m]
        diagonal = jnp.diag(mixed_distance)  # [n]
        key_spread = 2 * p @ u - diagonal[:, None]  # K̃_jj of row i, [n, m]
        distance = mixed_distance - 0.5 * (diagonal[:, None] + diagonal[None, :])
        spread, response = _centred_product(p, u, u), -_centred_product(p, key_change, u)
        # Weights that are not equal respond more: P_ij P_kj = p_ij p_kj (1 + b K_ik K̃_jj).
        same = _same_key(p, u)  # [n, n, m]: rows i and k, key j
        squares = score * query_covariance[:, :, None] * p[:, None, :] * p[None, :, :]  # [n, n, m]
        tilt_correction = jnp.sum(-squares * same**3, axis=2)  # [n, n]
        response_correction = jnp.sum(squares * same**2 * _same_key(p, key_change), axis=2)
        part = TokenKernel(p @ keys.variance - diagonal, distance, p @ key_change @ p.T)
        noise = score_noise(p, score * query_covariance, spread, key_spread, keys)
        kernel = jax.tree.map(jnp.add, part, noise)
        return kernel, spread + tilt_correction, response + response_correction

    part, tilted, response = jax.tree.map(
        lambda a: jnp.mean(a, axis=0), jax.vmap(head_kernel)(weights)
    )
    scores = (queries.change + (sizes["w_q"] + sizes["w_k"]) * query_covariance) * tilted
    scores = scores + 2 * query_covariance * response
    mixed = (sizes["w_v"] + sizes["w_o"]) * part.covariance
    part = part.replace(change=part.change + mixed + score * scores).scaled(gain)
    bias = jnp.einsum("hv,hvd->d", params.b_v, params.w_o) + params.b_o
    return part.plus(jnp.mean(jnp.square(bias)))


def score_noise(
    p: Float[Array, "n m"],
    query_covariance: Float[Array, "n n"],
    spread: Float[Array, "n n"],
    key_spread: Float[Array, "n m"],
    keys: TokenKernel,
) -> TokenKernel:
    """Compute what Gaussian scores add to the kernel of P y for weights p; see `attention_kernel`.

    NaN in rows whose variances of scores are above `LARGEST_VARIANCE`, or differ between keys by
    more than `MOST_UNEVEN` (standard deviation over p).

    Args:
        p: Weights of equal tokens.
        query_covariance: b K_ik of the queries.
        spread: T_ik(K, K).
        key_spread: K̃_jj = E|y_j − Σ_l p_il y_l|²/d of each row i.
        keys: Kernel of the keys' tokens.
    """
    length = jnp.diag(query_covariance)  # [n]
    level = jnp.sum(p * key_spread, axis=1)  # [n], the mean of a row over its keys
    uneven = jnp.sum(p * jnp.square(key_spread - level[:, None]), axis=1)
    inside = (length * level <= LARGEST_VARIANCE) & (length * jnp.sqrt(uneven) <= MOST_UNEVEN)
    length = jnp.where(inside, length, jnp.nan)
    drift = 0.5 * length[:, None] * p * (key_spread - level[:, None])  # D [n, m]
    # rows of D sum to 0: K may be replaced by v_j/2 − u_jm
    drift_distance, lengths = drift @ keys.distance @ p.T, 0.5 * drift @ keys.variance
    diagonal = jnp.diag(drift_distance)  # [n]; drift_distance is [n, n], lengths [n]
    count = 1 / jnp.sum(jnp.square(p), axis=1)  # [n], keys that a row sees
    other_share = jnp.maximum(1 - 1 / count, jnp.finfo(count.dtype).eps)
    root = jnp.sqrt(jnp.maximum(length, jnp.finfo(count.dtype).tiny))
    cosine = jnp.sum(query_covariance / root[:, None] / root[None, :], axis=1) - 1
    cosine = cosine / max(len(root) - 1, 1)  # [n]
    row_ratios = jax.vmap(overlap_ratios)
    variance_ratio, distance_ratio = row_ratios(count, length * level / other_share, cosine)
    second = from_covariance(query_covariance * spread, jnp.zeros_like(query_covariance))
    variance = second.variance + 2 * (lengths - diagonal)
    distance = (
        second.distance + drift_distance + drift_distance.T - diagonal[:, None] - diagonal[None, :]
    )
    pair_ratio = jnp.sqrt(distance_ratio[:, None] * distance_ratio[None, :])
    change = drift @ keys.change @ p.T
    return TokenKernel(variance_ratio * variance, pair_ratio * distance, change + change.T)


def _centred_product(p, a, b):
    """Compute T_ik(A, B) of `attention_kernel`, in O(n³)."""
    pa, pb, ap, bp = p @ a, p @ b, a @ p.T, b @ p.T  # [n, m] twice, [m, n] twice
    return p @ (a * b) @ p.T - (pa * pb) @ p.T - p @ (ap * bp) + (pa @ p.T) * (pb @ p.T)


def _same_key(p, a):
    """Compute Ã_jj of `attention_kernel` for each pair of rows, [n, n, m]."""
    pa, ap = p @ a, (a @ p.T).T  # [n, m] each
    return jnp.diag(a)[None, None, :] - pa[:, None, :] - ap[None, :, :] + (pa @ p.T)[:, :, None]


def mlp_kernel(
    params: layers.MLPParams, branch_input: TokenKernel, kind: str, sizes: Mapping[str, Number]
) -> TokenKernel:
    """Compute the kernel of φ(x W_in) W_out, and of φ(x W_gate) ∘ (x W_in) W_out where it is gated.

    z = x W_in is Gaussian; E φ(z_i)φ(z_j) for ReLU is the arc-cosine kernel of degree 1 (Cho and
    Saul 2009), else Σ_k a_k(v_i) a_k(v_j) ρ^k with Hermite coefficients a_k by Gauss-Hermite
    quadrature (Mehler). An update moves z by D + e_in K, and the output by
    E φ'(z_i)φ'(z_j) times that, and by e_out.

    Args:
        params: Parameters of the MLP; only mean squares of matrices are read.
        branch_input: Kernel of the input.
        kind: `TransformerConfig.mlp`.
        sizes: Squared relative sizes of updates of its matrices.
    """
    d, f = params.w_in.shape
    gated = kind in layers.GATED
    act = layers.GATED.get(kind, kind)

    def map_input(name):
        """Computes the kernel of x W + b, [n, n]."""
        w, b = getattr(params, f"w_{name}"), getattr(params, f"b_{name}")
        update = sizes[f"w_{name}"] * branch_input.covariance
        moved = branch_input.replace(change=branch_input.change + update)
        return moved.scaled(weight_gain(w, d)).plus(jnp.mean(jnp.square(b)))

    z = map_input("gate" if gated else "in")
    out, slope = activation_kernel(act, z)
    out = out.replace(change=slope * z.change)
    if gated:
        out = _multiply_kernels(out, map_input("in"))
    out = out.replace(change=out.change + sizes["w_out"] * out.covariance)
    out = out.scaled(weight_gain(params.w_out, f))
    return out.plus(jnp.mean(jnp.square(params.b_out)))


def _multiply_kernels(a: TokenKernel, b: TokenKernel) -> TokenKernel:
    """Compute the kernel of products a_i b_i of independent features, such as a gate and the hidden
    units.

    Expected products multiply. They are kept as mean squares and distances between tokens, so that
    small distances keep their digits; to first order, an update changes one factor at a time.
    """
    mean_variance = [0.5 * (s.variance[:, None] + s.variance[None, :]) for s in (a, b)]
    variance_gap = [s.variance[:, None] - s.variance[None, :] for s in (a, b)]  # [n, n] each
    distance = 0.25 * variance_gap[0] * variance_gap[1] + mean_variance[0] * b.distance
    distance = distance + (mean_variance[1] - b.distance) * a.distance
    change = a.change * b.covariance + a.covariance * b.change
    return TokenKernel(a.variance * b.variance, distance, change)


def activation_kernel(kind: str, z: TokenKernel) -> tuple[TokenKernel, Float[Array, "n n"]]:
    """Compute (kernel of φ(z), E φ'(z_i)φ'(z_j)) of Gaussian z; the kernel's change is left at 0.

    Args:
        kind: Name of φ in `layers.ACTIVATIONS`.
        z: Kernel of the features.
    """
    s = jnp.sqrt(jnp.maximum(z.variance, jnp.finfo(z.variance.dtype).tiny))
    pair = s[:, None] * s[None, :]
    # 1 − ρ_ij of z, from distances and lengths.
    one_minus_rho = (z.distance - 0.5 * jnp.square(s[:, None] - s[None, :])) / pair
    one_minus_rho = jnp.clip(one_minus_rho, 0, 2)
    if kind == "relu":
        return _relu_kernel(z, s, pair, one_minus_rho)
    nodes, weights, hermite = (jnp.asarray(table, s.dtype) for table in hermite_table())
    phi = layers.ACTIVATIONS[kind].fn
    a = (phi(s[:, None] * nodes[None, :]) * weights[None, :]) @ hermite.T  # a_k(v_i) [n, k]
    degree = jnp.arange(DEGREE, dtype=s.dtype)[:, None, None]  # [k, 1, 1]
    # 1 − ρ^k without cancellation where ρ is near 1; the general ρ may be negative.
    power = compute_powers(1 - one_minus_rho, DEGREE)  # ρ^k [k, n, n]
    near_one = -jnp.expm1(degree * jnp.log1p(-jnp.minimum(one_minus_rho, 0.5))[None])
    one_minus_power = jnp.where(one_minus_rho[None] < 0.5, near_one, 1 - power)
    products = a.T[:, :, None] * a.T[:, None, :]  # a_k(v_i) a_k(v_j) [k, n, n]
    unequal = 0.5 * jnp.sum(jnp.square(a.T[:, :, None] - a.T[:, None, :]), axis=0)
    distance = unequal + jnp.sum(products * one_minus_power, axis=0)
    slope = jnp.sum((degree * products)[1:] * power[:-1], axis=0) / pair
    return TokenKernel(jnp.sum(jnp.square(a), axis=1), distance, jnp.zeros_like(distance)), slope


def _relu_kernel(z, s, pair, one_minus_rho):
    """Compute `activation_kernel` of ReLU: the arc-cosine kernel.

    Args:
        z: Kernel of the activation's input.
        s: s_i, [n].
        pair: s_i s_j, [n, n].
        one_minus_rho: 1 − ρ_ij, [n, n].

    Returns:
        (kernel of the output, mean of φ'(z_i) φ'(z_j) [n, n]).
    """
    theta = 2 * jnp.arcsin(jnp.sqrt(0.5 * one_minus_rho))
    # sin θ − θ cos θ cancels for small θ: its series there.
    square = jnp.square(theta)
    series = theta * square * (1 / 3 - square * (1 / 30 - square / 840))
    sine_difference = jnp.where(theta < 0.3, series, jnp.sin(theta) - theta * jnp.cos(theta))
    kernel_gap = 0.5 * (one_minus_rho - sine_difference / np.pi)  # half of 1 − κ_1(ρ)
    distance = 0.25 * jnp.square(s[:, None] - s[None, :]) + pair * kernel_gap
    slope = 0.5 * (1 - theta / np.pi)
    return TokenKernel(0.5 * z.variance, distance, jnp.zeros_like(distance)), slope
