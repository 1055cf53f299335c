"""Tokens with every pairwise difference in a mantissa and a logarithm: norms, MLPs, skips.

x_i − x_k = e^{T_ik} U_ik with max|U_ik| = 1, for every pair, beside the tokens themselves. A
difference has its full relative accuracy however small it is beside the tokens or beside other
differences (clusters within clusters). Every operation maps the table to a table without
subtracting nearly equal numbers: what cancels, cancels by chance, and `pairs` watches that by
replicas, to which end every operand passes through `noise`. Attention is in `pair_attention`.

Numbers that may lie beyond float range are pairs (sign, log|.|), `Signed`.

Axis letters: i, k tokens (n of each), d width, f MLP width; the table's rows are written [i, k].
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse import struct
from rank_collapse.measures.residuals import composite_norm
from rank_collapse.network import layers
from rank_collapse.network.gains import scaled


@struct.dataclass
class PairState:
    """Tokens and all their differences, x_i − x_k = e^{log_scale_ik} · rest_ik.

    Attributes:
        tokens: [n, d], in ordinary arithmetic.
        rest: Mantissas [n, n, d], antisymmetric, largest |entry| of each pair 1, or 0.
        log_scale: Natural logarithms [n, n]; −inf where two tokens are equal.
    """

    tokens: Any
    rest: Any
    log_scale: Any

    def column(self, k, noise):
        """x_i − x_k of all tokens i: mantissas [n, d] and logarithms [n]."""
        return noise(self.rest[:, k]), noise(self.log_scale[:, k])

    def columns(self, reference, noise):
        """x_i − x_r for each head's reference [h]: mantissas [h, n, d] and logarithms [h, n]."""
        rest = jnp.swapaxes(self.rest[:, reference], 0, 1)
        return noise(rest), noise(self.log_scale[:, reference].T)

    def of_columns(self, column, noise) -> "PairState":
        """The table of what an operation gives as columns (k, noise); its tokens are to be set."""
        rest, log_scale = jax.lax.map(
            lambda k: column(k, noise.at(k)), jnp.arange(self.tokens.shape[0])
        )  # [k, i, d], [k, i]
        return PairState(None, *antisymmetric(jnp.swapaxes(rest, 0, 1), log_scale.T))


class Signed(NamedTuple):
    """sign · e^log, elementwise: sign −1, 0 or 1, log −inf where the number is 0."""

    sign: Any
    log: Any


def signed(a) -> Signed:
    """Ordinary numbers as `Signed`."""
    return Signed(jnp.sign(a), jnp.log(jnp.abs(a)))


def signed_sum(a: Signed, b: Signed) -> Signed:
    """a + b; digits are lost only where the two really cancel."""
    (of_a, of_b), top = two_shares(a.log, b.log)
    total = a.sign * of_a + b.sign * of_b
    return Signed(jnp.sign(total), top + jnp.log(jnp.abs(total)))


def product(a: Signed, b: Signed) -> Signed:
    return Signed(a.sign * b.sign, a.log + b.log)


def over(a: Signed, log) -> Signed:
    """a e^{−log}."""
    return Signed(a.sign, a.log - log)


def value(a: Signed):
    """As an ordinary number, which may over- or underflow."""
    return a.sign * jnp.exp(a.log)


def where(condition, a: Signed, b: Signed) -> Signed:
    return Signed(jnp.where(condition, a.sign, b.sign), jnp.where(condition, a.log, b.log))


def finite(log):
    return jnp.where(log == -jnp.inf, 0, log)


def shares(log, axis=-1):
    """(exp(log − top), top) with top = max log along an axis, kept; top is 0 where all is −inf.

    Some entry must be at the maximum. A compiler may compute `log` anew for the difference and
    round otherwise, and logarithms of 1e12 have an ulp of 1e5 in float32: where no entry is at the
    maximum, the result is NaN rather than 0.
    """
    top = jnp.max(log, axis=axis, keepdims=True)
    out = jnp.exp(jnp.minimum(log - finite(top), 0))
    return out, _at_top(jnp.max(out, axis=axis, keepdims=True), top)


def signed_total(terms: Signed) -> Signed:
    """Σ_j of `Signed` [..., j], kept as [..., 1]."""
    sizes, top = shares(terms.log)
    total = jnp.sum(terms.sign * sizes, axis=-1, keepdims=True)
    return Signed(jnp.sign(total), top + jnp.log(jnp.abs(total)))


def two_shares(log_a, log_b):
    """As `shares`, of two arrays, entry by entry."""
    top = jnp.maximum(log_a, log_b)
    out = [jnp.exp(jnp.minimum(log - finite(top), 0)) for log in (log_a, log_b)]
    return out, _at_top(jnp.maximum(*out), top)


def _at_top(largest, top):
    return jnp.where((top > -jnp.inf) & (largest < 0.5), jnp.nan, finite(top))


def log_expm1_ratio(x):
    """log((1 − e^{−x})/x) for x ≥ 0; 0 at x = 0.

    With it log(1 − e^{−x}) = log x + log_expm1_ratio(x) keeps the log x that is known where x
    itself underflows, and no threshold parts small from large.
    """
    tiny = x < jnp.finfo(x.dtype).tiny
    safe = jnp.where(tiny, 1, x)
    return jnp.where(tiny, 0, jnp.log(-jnp.expm1(-safe) / safe))


def log_sinh(a: Signed) -> Signed:
    """sinh a: e^x (1 − e^{−2x})/2 for x = |a|."""
    x = jnp.exp(a.log)
    return Signed(a.sign, x + a.log + log_expm1_ratio(2 * x))


def log_cosh(x):
    x = jnp.abs(x)
    return x + jnp.log1p(jnp.exp(-2 * x)) - math.log(2.0)


def differences(x) -> PairState:
    """The table of given tokens [n, d]: each subtraction is right to half an ulp."""
    rest, log_scale = normalise(x[:, None, :] - x[None, :, :], jnp.zeros(2 * x.shape[:1], x.dtype))
    return PairState(x, rest, log_scale)


def normalise(rest, log_scale):
    """(U, T) with max|U| = 1 over the last axis; T = −inf where U is 0."""
    size = jnp.max(jnp.abs(rest), axis=-1)
    safe = jnp.where(size == 0, 1, size)
    log_scale = jnp.where(size == 0, -jnp.inf, log_scale + jnp.log(safe))
    return rest / safe[..., None], log_scale


def add_scaled(a, log_a, b, log_b):
    """Mantissas and logarithms of e^{log_a} a + e^{log_b} b, vectors in the last axis."""
    (of_a, of_b), top = two_shares(log_a, log_b)
    return normalise(of_a[..., None] * a + of_b[..., None] * b, top)


def antisymmetric(rest, log_scale):
    """The table from its pairs i > k alone."""
    n = log_scale.shape[0]
    below = jnp.tril(jnp.ones((n, n), bool), -1)
    mirrored = jnp.where(below.T[..., None], -jnp.swapaxes(rest, 0, 1), 0)
    rest = jnp.where(below[..., None], rest, mirrored)
    log_scale = jnp.where(below, log_scale, jnp.where(below.T, log_scale.T, -jnp.inf))
    return rest, log_scale


def add(site, state: PairState, part: PairState) -> PairState:
    """γ part + λ state·[skip] of a `Site`, for any float gains, 0 and negative ones included."""
    out = _scale(site.branch_gain, part)
    if not site.skip:
        return out
    kept = _scale(site.skip_gain, state)
    rest, log_scale = add_scaled(out.rest, out.log_scale, kept.rest, kept.log_scale)
    return PairState(out.tokens + kept.tokens, rest, log_scale)


def _scale(gain, state):
    table = times(gain, state.rest, state.log_scale)
    return PairState(scaled(gain, state.tokens), *table)


def times(gain, rest, log_scale):
    """gain · x, a scalar or [d]: its size goes to the logarithms, however small it is."""
    size = jnp.max(jnp.abs(gain))
    rest = scaled(gain / jnp.where(size == 0, 1, size), rest)
    return normalise(rest, log_scale + jnp.log(size))


def log10_residual(state: PairState, keep):
    """log10 ‖res(X)‖_{1,∞} around the mean token: row i of the residual is mean_k (x_i − x_k)."""
    seen = keep[:, None] & keep[None, :]
    scales = jnp.where(seen, state.log_scale, -jnp.inf)
    weights, top = shares(scales.reshape(-1))
    weights, top = weights.reshape(seen.shape) / jnp.sum(keep), top[0]
    residual = jnp.einsum("ik,ikd->id", weights, jnp.where(seen[..., None], state.rest, 0))
    return (top + jnp.log(composite_norm(residual))) / np.log(10.0)


def norm(site, state: PairState, noise) -> PairState:
    """The norm of a `Site`, from the change of σ rather than from a difference of outputs.

    c are the centred tokens (RMSNorm: not centred), r = c_i − c_k from the table; `normalised`.
    """
    center, rest = centered(site, noise(state.tokens)), centered(site, noise(state.rest))
    tokens, rest = normalised(center, rest, site.eps, noise)
    rest = rest if site.norm is None else scaled(site.norm.gain, rest)
    table = antisymmetric(*normalise(noise(rest), state.log_scale))
    return PairState(with_gain(site, tokens), *table)


def centered(site, a):
    """Less the mean over the features, where the site's norm takes it off."""
    return a - jnp.mean(a, axis=-1, keepdims=True) if site.norm_kind == "layer" else a


def with_gain(site, tokens):
    """Normalised tokens with the gain and the bias of the site's norm."""
    if site.norm is None:
        return tokens
    tokens = scaled(site.norm.gain, tokens)
    return tokens if site.norm.bias is None else tokens + site.norm.bias[None, :]


def normalised(center, rest, norm_eps, noise):
    """c_i/σ_i, and all c_i/σ_i − c_k/σ_k from r = c_i − c_k [n, n, d], over the scale of r."""
    sigma = deviation(center, norm_eps, noise)
    at_i, at_k = (sigma[:, None], center[:, None, :]), (sigma[None, :], center[None, :, :])
    return center / sigma[:, None], normalised_difference(rest, at_i, at_k, noise)


def deviation(center, norm_eps, noise):
    """σ of centred tokens [n, d]."""
    variance = jnp.mean(jnp.square(center), axis=-1)
    return noise(jnp.sqrt(variance + jnp.asarray(norm_eps, center.dtype)))


def normalised_difference(rest, at_i, at_k, noise):
    """c_i/σ_i − c_k/σ_k from r = c_i − c_k [..., d], both over the scale of r.

    The difference is r/σ_i − c_k (σ_i² − σ_k²)/(σ_i σ_k (σ_i + σ_k)) with σ_i² − σ_k² =
    r·(c_i + c_k)/d.

    Args:
        rest: r.
        at_i, at_k: (σ, c) of the two, of the ranks of r.
        noise: See `noise.Noise`.
    """
    (sigma_i, c_i), (sigma_k, c_k) = at_i, at_k
    change = jnp.einsum("...d,...d->...", rest, c_i + c_k)
    change = change / rest.shape[-1] / sigma_i / sigma_k / (sigma_i + sigma_k)
    return rest / sigma_i[..., None] - noise(change)[..., None] * c_k


def mlp(params, state, kind: str, noise):
    """The MLP of a state, table or tree: by features, φ(z_i) − φ(z_k) in a sign and a logarithm.

    Gated: φ(g_i) y_i − φ(g_k) y_k = φ(g_i)(y_i − y_k) + y_k (φ(g_i) − φ(g_k)). Saturated features,
    whose difference lies below float range, count where no other does.
    """
    name = layers.GATED.get(kind, kind)
    tokens = noise(state.tokens)
    z = noise(tokens @ params.w_in + params.b_in[None, :])
    gate = None
    if kind in layers.GATED:
        gate = noise(tokens @ params.w_gate + params.b_gate[None, :])

    def column(k, own):
        rest, log_scale = state.column(k, own)

        def step(w):
            sign, log = signed(own(rest @ w))
            return Signed(sign, log + log_scale[:, None])

        if gate is None:
            change = activation_difference(name, z[k][None, :], z, step(params.w_in))
        else:
            phi = product(signed(gate), Signed(1.0, log_gate(name, gate)))
            slope = activation_difference(name, gate[k][None, :], gate, step(params.w_gate))
            change = product(phi, step(params.w_in))
            change = signed_sum(change, product(signed(z[k][None, :]), slope))
        change = Signed(change.sign, own(change.log))
        sizes, top = shares(change.log)
        return normalise((change.sign * sizes) @ params.w_out, top[:, 0])

    return state.of_columns(column, noise).replace(tokens=layers.mlp(params, tokens, kind))


def log_gate(name: str, z):
    """log(φ(z)/z) of a kind of `layers.ACTIVATIONS` whose gate is positive; ReLU: −inf below 0."""
    if name == "relu":
        return jnp.where(z > 0, 0, -jnp.inf).astype(z.dtype)
    if name == "gelu":
        return jax.scipy.special.log_ndtr(z)
    return jax.nn.log_sigmoid(_sigmoid_argument(name, z))


def _sigmoid_argument(name, z):
    """p with φ(z) = z · sigmoid(p)."""
    if name == "gelu_tanh":
        return jnp.asarray(2 * math.sqrt(2 / math.pi), z.dtype) * (z + 0.044715 * z * z * z)
    return z if name == "silu" else 1.702 * z  # quick_gelu


def activation_difference(name: str, z, end, step: Signed) -> Signed:
    """φ(end) − φ(z) where end − z = step, which is known far below the rounding of z.

    φ(z) = z·g(z) gives step·g(end) + z·(g(end) − g(z)); both terms have their relative accuracy.

    Args:
        name: One of `layers.ACTIVATIONS`.
        z, end: Where the difference is taken.
        step: Their difference.
    """
    if name == "identity":
        return step
    if name == "relu":
        to_zero = signed(z)
        further = step.log > to_zero.log  # else both ends are on one side of 0
        up = signed_sum(step, to_zero)
        nothing = Signed(jnp.zeros_like(step.sign), jnp.full_like(step.log, -jnp.inf))
        down = Signed(-to_zero.sign, to_zero.log)
        from_above = where(further & (step.sign < 0), down, step)
        return where(z > 0, from_above, where(further & (step.sign > 0), up, nothing))
    if name == "tanh":  # 2 sigmoid(2z) − 1
        twice = Signed(step.sign, step.log + math.log(2.0))
        rise = _sigmoid_difference(2 * z, 2 * end, twice)
        return Signed(rise.sign, rise.log + math.log(2.0))
    if name == "gelu":
        gates = _normal_difference(z, end, step)
    else:
        slope = jnp.log(jnp.asarray(1.702 if name == "quick_gelu" else 1.0, z.dtype))
        if name == "gelu_tanh":  # a positive form in (z, end)
            form = 1 + 0.044715 * (z * z + z * end + end * end)
            slope = jnp.log(jnp.asarray(2 * math.sqrt(2 / math.pi), z.dtype) * form)
        arguments = (_sigmoid_argument(name, a) for a in (z, end))
        gates = _sigmoid_difference(*arguments, Signed(step.sign, step.log + slope))
    first = product(step, Signed(1.0, log_gate(name, end)))
    return signed_sum(first, product(signed(z), gates))


def _sigmoid_difference(p, q, step):
    """sigmoid(q) − sigmoid(p) = sinh(step/2)/(2 cosh(p/2) cosh(q/2)), or by tails over long steps.

    Over steps longer than 1 the logarithms of the tails differ by more than 1/4, while sinh and
    cosh would cancel.
    """
    half = log_sinh(Signed(step.sign, jnp.minimum(step.log, 0) - math.log(2.0)))
    short = half.log - math.log(2.0) - log_cosh(p / 2) - log_cosh(q / 2)
    return Signed(step.sign, jnp.where(step.log <= 0, short, _by_tails(jax.nn.log_sigmoid, p, q)))


def _by_tails(log_cdf, a, b):
    """log|F(b) − F(a)| of a symmetric distribution, from the lighter tails: F(x) = 1 − F(−x)."""
    side = jnp.where(a + b > 0, -1.0, 1.0).astype(a.dtype)
    lower, upper = log_cdf(side * a), log_cdf(side * b)
    gap = jnp.abs(lower - upper)
    return jnp.maximum(lower, upper) + jnp.log(-jnp.expm1(-gap))


# Gauss-Legendre on [0, 1]: for e^{ct} with |c| ≤ 1.5 eight nodes are right to 1e-20.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_NODES, _WEIGHTS = (_NODES + 1) / 2, _WEIGHTS / 2


def _normal_difference(z, end, step):
    """Φ(end) − Φ(z): a mean of the density over short steps, else a difference of tails.

    A step is short where the density changes by less than a factor e^{3/2}: |step| max(|z|, 1) ≤ 1.
    Over longer ones log Φ changes by more than 1/2, or the ends lie on both sides of 0, so that
    the difference of the tails loses no more than a digit.
    """
    size = jnp.exp(step.log)
    short = size * jnp.maximum(jnp.abs(z), 1) <= 1
    s = jnp.where(short, step.sign * size, 0)
    mean = sum(
        jnp.asarray(w, z.dtype) * jnp.exp(-s * t * (z + s * t / 2))
        for t, w in zip(_NODES, _WEIGHTS, strict=True)
    )
    density = -(z * z) / 2 - math.log(2 * math.pi) / 2
    small = step.log + density + jnp.log(mean)
    large = _by_tails(jax.scipy.special.log_ndtr, z, end)
    return Signed(step.sign, jnp.where(short, small, large))
