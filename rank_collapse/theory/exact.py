"""Residual profiles with every digit proved: the equations of a network in ball arithmetic.

A number is a ball of python-flint's `arb`: a midpoint, and a radius that bounds the rounding
errors. Use it for networks whose `log_residual_profile` is NaN because rounding errors decide, and
wherever a proof is needed. It needs python-flint, the extra `exact`.

Arrays hold balls as objects. Axis letters: h heads, n tokens, m keys, d width, k head width.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator

import jax
import numpy as np

from rank_collapse.annotations import ArrayLike, Tree
from rank_collapse.checks import check_whole, refuse_if
from rank_collapse.extras import import_package
from rank_collapse.network import covers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.layers import GATED
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.residual import ResidualSpec, layer_gains
from rank_collapse.network.walk import Algebra, Layer, walk_layer

flint = import_package("flint", "rank_collapse.theory.exact_profile", "exact")
arb, arb_mat = flint.arb, flint.arb_mat
NARROW = 1e-12  # the largest radius of a proved logarithm, relative where it is above 1


@dataclasses.dataclass(frozen=True)
class ExactProfile:
    """log10 ‖res(X^l)‖_{1,∞} with its proved accuracy.

    Attributes:
        profile: float64 [L + 1]; NaN from the layer on that the digits did not suffice for.
        radius: [L + 1], the largest possible error of the exact value; NaN where the value is NaN.
        digits: Decimal digits of the arithmetic.
    """

    profile: np.ndarray
    radius: np.ndarray
    digits: int


def exact_profile(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    digits: int = 50,
    max_digits: int = 25_600,
    max_seconds: float = 600.0,
    **inputs: ArrayLike | None,
) -> ExactProfile:
    """Compute log10 ‖res(X^l)‖_{1,∞} for l = 0..L around the mean token, every digit proved.

    It runs on the host in ball arithmetic. Digits are doubled until the balls of the logarithms are
    narrower than 1e-12 (relative above 1): a residual of 1e-1000 takes about 1,600 of them. Nothing
    is raised where the most digits do not suffice. The profile is then NaN from that layer on, as
    it is for tokens that are exactly equal. Of 48 networks of 6 layers at weight scales of 1.5 to
    3, 45 are proved with at most 3,200 digits; in three of attention alone, tokens become equal to
    more of them.

    The proof is about the formulas, evaluated at exactly these numbers: parameters, gains, X^0,
    biases, and the tables of rotary positions as JAX rounds them. An overflow of the same formulas
    in floating point has no influence.

    Args:
        params, x, config: See `rank_collapse.apply`.
        digits, max_digits: Decimal digits of the first attempt, and the largest number tried.
        max_seconds: No attempt begins that would take longer; the estimate is three times the
            previous attempt.
        **inputs: mask, bias, segments and positions of `apply`; tokens outside a mask [n] are left
            out of the residual.

    Raises:
        ValueError: Traced arrays, numbers that are not finite, cross-attention, a mixture of
            experts, relative-key positions, an invalid range of digits, or inputs of the wrong
            shape.
    """
    refuse_if(
        any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((params, x, config))),
        "exact_profile takes concrete arrays: call it outside of jit and vmap",
    )
    digits = check_whole("digits", digits, 10, check_whole("max_digits", max_digits, 10))
    network = _list_layers(params, x, config, inputs)
    while True:
        begun = time.monotonic()
        with flint.ctx.workdps(digits):
            proved = list(_prove_profile(network))
        seconds = time.monotonic() - begun
        if len(proved) > config.depth or 2 * digits > max_digits or 3 * seconds > max_seconds:
            break
        digits *= 2
    missing = [(np.nan, np.nan)] * (config.depth + 1 - len(proved))
    profile, radius = np.array(proved + missing).T
    return ExactProfile(profile, radius, digits)


def _list_layers(params, x, config, inputs) -> list[Layer]:
    """List the layers of a network, after a check that all numbers are finite.

    Args:
        params, x, config: See `exact_profile`.
        inputs: Further arguments of `prepare_inputs`.

    Raises:
        ValueError: A number that is not finite, or a mask that leaves out every token.
    """
    params, prepared = prepare_inputs(params, x, config, covers=Balls.covers, **inputs)
    gains = layer_gains(config, prepared.x.dtype, params)
    prepared, gains, stack = jax.tree.map(np.asarray, (prepared, gains, params.layers))
    arrays = {"x": prepared.x, "bias": prepared.context.bias, "params": stack, "config": gains}
    for name, tree in arrays.items():
        finite = all(np.isfinite(np.float64(a)).all() for a in jax.tree.leaves(tree))
        refuse_if(not finite, f"{name} has values that are not finite")
    mask = prepared.token_mask
    refuse_if(mask is not None and not mask.any(), f"mask={mask} leaves out every token")
    return [
        Layer(select_row(stack, row), select_row(gains, index), index, config, prepared)
        for index, row in enumerate(config.layer_map or range(config.depth))
    ]


def select_row(tree: Tree, row: int) -> Tree:
    """Select one layer of a stack."""
    return jax.tree.map(lambda a: a[row], tree)


def _prove_profile(network: list[Layer]) -> Iterator[tuple[float, float]]:
    """Yields (logarithm, radius) layer by layer, up to the first one that is not proved."""
    start, exists = to_balls(network[0].inputs.x), np.asarray(network[0].inputs.existing_tokens)

    def pass_layer(state, layer):
        return walk_layer(Balls(), layer, state)[0]

    for state in itertools.accumulate(network, pass_layer, initial=start):
        log10_residual = _log10_residual(state[exists])
        if log10_residual is None:
            return
        yield log10_residual


def _log10_residual(x: np.ndarray) -> tuple[float, float] | None:
    """Compute (log10 ‖res‖_{1,∞}, its radius) of tokens; None where the ball is wide."""
    distances = abs(x - x.sum(axis=0) / len(x))  # |res| [n, d]

    def find_largest(sums):
        return functools.reduce(arb.max, sums)

    norm_1 = find_largest(distances.sum(axis=0))
    norm_inf = find_largest(distances.sum(axis=1))
    square = norm_1 * norm_inf  # ‖res‖²_{1,∞}
    if square == 0:
        return -np.inf, 0.0
    if not square > 0:  # the ball holds 0
        return None
    log = square.log() / 2 / arb.const_log10()
    value = float(log.mid())
    radius = float(np.nextafter(float((log - value).abs_upper()), np.inf))
    return (value, radius) if radius <= NARROW * max(1.0, abs(value)) else None


class Balls(Algebra):
    """Norms, sums, attention and MLPs of tokens [n, d] of balls."""

    covers = covers.Covers(
        "exact_profile",
        covers.all_fields_but(
            *covers.CROSS, *covers.MIXING, *covers.CALLER_FUNCTIONS, *covers.EXPERTS
        )
        | covers.MLPS
        | {"norm": covers.NORM_KINDS},
    )

    def apply_norm(self, layer: Layer, spec: ResidualSpec, state: np.ndarray) -> np.ndarray:
        """Normalise tokens [n, d] of intervals (balls) as the spec says."""
        if spec.norm_kind == "layer":
            state = state - state.sum(axis=1, keepdims=True) / state.shape[1]
        state = divide_by_rms(state, spec.eps)
        bias = 0 if spec.norm.bias is None else to_balls(spec.norm.bias)
        return state * to_balls(spec.norm.gain) + bias

    def add_branch(
        self, layer: Layer, spec: ResidualSpec, state: np.ndarray, part: np.ndarray
    ) -> np.ndarray:
        """Compute γ part + λ state·[skip] in exact intervals (balls), with gains γ and λ of the
        branch and of the skip.

        Args:
            layer: The layer.
            spec: Its gains, and whether it has a skip.
            state: Stream before the branch [n, d].
            part: Output of the branch [n, d].
        """
        part = part * to_balls(spec.branch_gain)
        return part + state * to_balls(spec.skip_gain) if spec.skip else part

    def apply_attention(self, layer: Layer, x: np.ndarray) -> tuple[np.ndarray, None]:
        """Compute Σ_h P_h X W_h + b_o.

        Returns:
            (the branch [n, d], no further results: None).
        """
        p, context = layer.params.attention, jax.tree.map(np.asarray, layer.context)
        values = [affine_map(x, w, b) for w, b in zip(p.w_v, p.b_v, strict=True)]
        scores = _attention_scores(p, x, layer.config, context, layer.gains.temperature)
        mask = np.broadcast_to(True if context.mask is None else context.mask, scores.shape)
        heads = zip(scores, mask, values, strict=True)
        mixed = [multiply_balls(softmax(s, is_allowed), v) for s, is_allowed, v in heads]
        w_o = p.w_o.reshape(-1, p.w_o.shape[-1])
        return affine_map(np.concatenate(mixed, axis=1), w_o, p.b_o), None

    def apply_mlp(self, layer: Layer, x: np.ndarray) -> tuple[np.ndarray, None]:
        """Compute φ(x W_in + b_in) W_out + b_out, gated where the config says so."""
        p, kind = layer.params.mlp, layer.config.mlp
        hidden = affine_map(x, p.w_in, p.b_in)
        if kind in GATED:
            hidden = ACTIVATIONS[GATED[kind]](affine_map(x, p.w_gate, p.b_gate)) * hidden
        else:
            hidden = ACTIVATIONS[kind](hidden)
        return affine_map(hidden, p.w_out, p.b_out), None


def _attention_scores(p, x, config, context, temperature):
    """Compute scores [h, n, n] after the cap, with biases.

    Args:
        p: Parameters of the attention.
        x: Tokens [n, d], balls.
        config: The network.
        context: Masks, biases and positions.
        temperature: The temperature of the layer.
    """
    content = [affine_map(x, w) for w in p.w_q]
    q = np.stack(content) + to_balls(p.b_q)[:, None]
    k = np.stack([affine_map(x, w, b) for w, b in zip(p.w_k, p.b_k, strict=True)])
    q, k = _head_norm(p.q_norm, q, config.norm_eps), _head_norm(p.k_norm, k, config.norm_eps)
    if context.rotary is not None:
        cos, sin = map(to_balls, context.rotary)
        q, k = _rotate_pairs(q, cos, sin), _rotate_pairs(k, cos, sin)
    if config.score == "additive":
        pairs = TANH(q[:, :, None] + k[:, None])
        scores = (pairs * to_balls(p.v_score)[:, None, None]).sum(axis=-1)
    else:
        scores = np.stack([multiply_balls(a, b.T) for a, b in zip(q, k, strict=True)])
        if p.relative is not None and context.relative is not None:
            scores = scores + _relative_scores(p.relative, content, context)
        if config.scale_scores:
            scores = scores / arb(q.shape[-1]).sqrt()
    scores = scores / to_balls(temperature)
    if context.cap is not None:
        scores = TANH(scores / to_balls(context.cap)) * to_balls(context.cap)
    return scores if context.bias is None else scores + to_balls(context.bias)


def _head_norm(gain, heads, eps):
    """Divide queries or keys [h, n, k] by the root mean square of each head, or of all heads."""
    if gain is None:
        return heads
    if gain.ndim == 1:
        return np.stack([divide_by_rms(a, eps) for a in heads]) * to_balls(gain)
    joint = divide_by_rms(np.concatenate(heads, axis=1), eps)
    return np.stack(np.split(joint, len(heads), axis=1)) * to_balls(gain)[:, None]


def _rotate_pairs(a, cos, sin):
    """Apply rotary positions to queries or keys [h, n, k], see `positions.rotate`."""
    width, half = cos.shape[1], cos.shape[1] // 2
    across = np.concatenate([-a[..., half:width], a[..., :half]], axis=-1)
    return np.concatenate([a[..., :width] * cos + across * sin, a[..., width:]], axis=-1)


def _relative_scores(p, content, context):
    """Compute position and segment terms of scores [h, n, n] in intervals:
    `positions.relative_scores`.

    Args:
        p: Parameters of relative attention.
        content: Queries of each head [n, k], before their bias.
        context: Relative positions and segments of the layer.
    """
    i, j = np.indices((len(content[0]), len(content[0])))
    encodings, segments = to_balls(context.relative), context.segments
    head_scores = []
    for head, q in enumerate(content):
        keys = multiply_balls(encodings, to_balls(p.w_r[head]))
        s = multiply_balls(q + to_balls(p.b_r[head]), keys.T)[i, len(i) - 1 - (i - j)]
        if segments is not None:
            # [n, 2]: the term of the same segment, and that of another one
            terms = multiply_balls(q + to_balls(p.b_s[head]), to_balls(p.segment[:, head]).T)
            s = s + terms[i, (segments[i] != segments[j]).astype(int)]
        head_scores.append(s)
    return np.stack(head_scores)


def to_balls(a: ArrayLike) -> Tree:
    """Convert floats to balls without radius."""
    return np.frompyfunc(lambda v: arb(float(v)), 1, 1)(np.asarray(a, np.float64))


def multiply_balls(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply two matrices of balls."""
    return np.array((arb_mat(a.tolist()) * arb_mat(b.tolist())).tolist(), object)


def affine_map(x: np.ndarray, w: ArrayLike, b: ArrayLike | None = None) -> np.ndarray:
    """Compute x W + b for floats W [d, e] and b [e] or None."""
    out = multiply_balls(x, to_balls(w))
    return out if b is None else out + to_balls(b)


def divide_by_rms(x: np.ndarray, eps: float) -> np.ndarray:
    """Divide each token by σ, σ² = mean x² + eps."""
    square = (x * x).sum(axis=1, keepdims=True) / x.shape[1] + arb(eps)
    return x / np.frompyfunc(arb.sqrt, 1, 1)(square)


def softmax(scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Compute weights of the allowed keys, 0 of the others; all alike where none is allowed.

    Args:
        scores: Balls [n, m].
        allowed: Bool [n, m].
    """
    weights = np.full(scores.shape, arb(0), object)
    for row, row_scores, is_allowed in zip(weights, scores, allowed, strict=True):
        if is_allowed.any():
            row[is_allowed] = EXP(
                row_scores[is_allowed] - max(v.mid() for v in row_scores[is_allowed])
            )
        else:
            row[:] = arb(1)
        row /= row.sum()
    return weights


def sigmoid(z: np.ndarray) -> np.ndarray:
    """Compute 1/(1 + e^−z)."""
    return 1 / (1 + EXP(-z))


EXP, TANH, ERFC = (np.frompyfunc(f, 1, 1) for f in (arb.exp, arb.tanh, arb.erfc))
ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": np.frompyfunc(lambda z: z.max(arb(0)), 1, 1),
    "gelu": lambda z: z * ERFC(-z / arb(2).sqrt()) / 2,
    "gelu_tanh": lambda z: z * sigmoid(2 * (2 / arb.pi()).sqrt() * (z + 0.044715 * z**3)),
    "quick_gelu": lambda z: z * sigmoid(1.702 * z),
    "silu": lambda z: z * sigmoid(z),
    "tanh": TANH,
}
