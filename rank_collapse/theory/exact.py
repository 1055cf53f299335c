"""Residual profiles with every digit proved: a network in ball arithmetic.

For networks and depths where `log_residual_profile` is NaN because rounding errors decide, and
wherever a proof is needed. Needs python-flint, the extra `exact`.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

import flint
import jax
import numpy as np
from flint import arb

from rank_collapse.network import (
    Algebra,
    Layer,
    ResidualSpec,
    TransformerConfig,
    covers,
    layer_gains,
    layers,
    prepare_inputs,
    walk_layer,
)
from rank_collapse.struct import refuse, refuse_if
from rank_collapse.theory import balls
from rank_collapse.theory.ball_attention import BallAttention
from rank_collapse.theory.balls import Split, Tokens, affine, minus, plus, total

NARROW = 1e-12  # the largest radius of a proved logarithm, relative where it is above 1


@dataclasses.dataclass(frozen=True)
class ExactProfile:
    """log10 ‖res(X^l)‖_{1,∞} with its proved accuracy.

    Attributes:
        profile: float64 [L + 1]; −inf where the residual is exactly 0, NaN from the layer on that
            the digits did not suffice for.
        radius: [L + 1], what the exact value differs from it by at the most; NaN where it is NaN.
        digits: Decimal digits of the arithmetic.
        more_seconds: Estimate for twice as many; 0 where every layer is proved.
    """

    profile: np.ndarray
    radius: np.ndarray
    digits: int
    more_seconds: float = 0.0


def exact_profile(
    params: Any,
    x: Any,
    config: TransformerConfig,
    *,
    digits: int = 50,
    max_digits: int = 6400,
    max_seconds: float = 600.0,
    **inputs: Any,
) -> ExactProfile:
    """log10 ‖res(X^l)‖_{1,∞} for l = 0..L around the mean token, every digit proved; on the host.

    Tokens are kept as differences within groups of near ones (`balls`), in ball arithmetic whose
    digits are doubled until the balls of the logarithms are narrower than 1e-12 (relative above 1).
    Neither the size of a residual nor that of clusters takes digits: 50 serve for 1e-14000, and 100
    for 48 networks of 6 layers at weight scales 1.5 to 3.

    The proof is about the formulas, evaluated at exactly these numbers: parameters, gains, X^0,
    biases, and the tables of rotary and relative positions as JAX rounds them. An overflow of the
    same formulas in floating point has no influence.

    16 tokens, d = 32, 4 heads, 6 layers take 0.14 s of CPU time at 50 digits, 64 tokens, d = 64,
    12 layers 4 s, three times that with 200 digits: see `estimated_seconds`.

    Args:
        params, x, config: As for `rank_collapse.apply`.
        digits, max_digits: Decimal digits of the first attempt, and the largest number tried.
        max_seconds: No attempt is begun whose estimate is above; that of the first is an error.
        **inputs: mask, bias, segments and positions of `apply`; tokens that a mask [n] leaves out
            are left out of the residual.

    Raises:
        ValueError: Traced arrays, numbers that are not finite, cross-attention, digits that are no
            range, inputs of the wrong shape, or a first attempt that would take too long.
    """
    refuse(
        (
            any(
                isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((params, x, config, inputs))
            ),
            "exact_profile takes concrete arrays: call it outside of jit and vmap",
        ),
        (
            not 10 <= digits <= max_digits,
            f"digits={digits} is not between 10 and max_digits={max_digits}",
        ),
    )
    network, last_refused = _network(params, x, config, inputs), 0.0
    seconds = estimated_seconds(config, len(network[0].inputs.x), digits)
    if seconds > max_seconds:
        n = len(network[0].inputs.x)
        raise ValueError(
            f"{n} tokens of width {config.d_model} in {config.depth} layers at {digits} digits "
            f"take about {seconds:.2g} s, more than max_seconds={max_seconds:g}"
        )
    while True:
        with flint.ctx.workdps(digits):
            found = list(_profile(network))
        if len(found) == config.depth + 1:
            break
        more = min(2 * digits, max_digits)
        last_refused = estimated_seconds(config, len(network[0].inputs.x), 2 * digits)
        if more == digits or last_refused > max_seconds:
            break
        digits, last_refused = more, 0.0
    missing = [(np.nan, np.nan)] * (config.depth + 1 - len(found))
    profile, radius = np.array(found + missing).T
    return ExactProfile(profile, radius, digits, last_refused)


def estimated_seconds(config: TransformerConfig, num_tokens: int, digits: int) -> float:
    """The time of one attempt of `exact_profile` on one core, within a factor of about 3."""
    n, d, h, f = num_tokens, config.d_model, config.num_heads, config.ff_width
    k, v = config.qk_width, config.v_width
    units = 0 if config.mlp == "none" else f
    maps = 2 + (config.mlp in layers.GATED)
    products = n * d * (2 * h * (k + v) + maps * units) + n * n * h * (k + v)
    features = n * n * h * (k if config.score == "additive" else 1) + 2 * n * units
    entries = n * (8 * d + 2 * h * (k + v) + 4 * units)
    each = 6e-8 + 1.7e-7 * (digits / 200) ** 1.55, 2e-6 + 8e-5 * (digits / 1000) ** 1.5
    return config.depth * (products * each[0] + features * 3 * each[1] + entries * each[1] / 8)


def _network(params, x, config, inputs) -> list[Layer]:
    """The layers of a network, checked."""
    params, prepared = prepare_inputs(params, x, config, covers=Balls.covers, **inputs)
    gains = layer_gains(config, prepared.x.dtype, params)
    prepared, gains, stack = jax.tree.map(np.asarray, (prepared, gains, params.layers))
    arrays = {"x": prepared.x, "bias": prepared.context.bias, "params": stack, "config": gains}
    for name, tree in arrays.items():
        floats = (np.asarray(a, np.float64) for a in jax.tree.leaves(tree))
        refuse_if(
            not all(np.isfinite(a).all() for a in floats), f"{name} has values that are not finite"
        )
    if prepared.token_mask is not None and not prepared.token_mask.any():
        raise ValueError(f"mask of shape {prepared.token_mask.shape} leaves out every token")
    rows = config.layer_map or range(config.depth)
    return [
        Layer(
            jax.tree.map(lambda a, row=row: a[row], stack),
            jax.tree.map(lambda a, l=l: a[l], gains),
            l,
            config,
            prepared,
        )
        for l, row in enumerate(rows)
    ]


def _profile(network: list[Layer]) -> Iterator[tuple[float, float]]:
    """(logarithm, radius) layer by layer, up to the first one that is not proved."""
    x, exists = network[0].inputs.x, network[0].inputs.token_mask
    exists = np.ones(len(x), bool) if exists is None else exists
    first, algebra = int(np.argmax(exists)), Balls()
    state = balls.one_group(np.where(exists[:, None], x, x[first]), first)
    found = _log10_residual(state, exists)
    for layer in network:
        if found is None:
            return
        yield found
        try:
            state, _ = walk_layer(algebra, layer, state)
        except balls.Undecided:
            return
        found = _log10_residual(state, exists)
    if found is not None:
        yield found


class Balls(Algebra):
    """Norms, sums, attention and MLPs of `balls.Tokens`."""

    covers = covers.Covers(
        "exact_profile",
        covers.everything_but(*covers.CROSS, *covers.MIXING, *covers.OWN, *covers.CLAMP)
        | covers.MLPS
        | {"norm": covers.NORM_KINDS},
    )

    def norm(self, layer: Layer, spec: ResidualSpec, state: Tokens) -> Tokens:
        """The norm of a spec."""

        def norm(x):
            x = balls.normalised(balls.centered(x) if spec.norm_kind == "layer" else x, spec.eps)
            if spec.norm is None:
                return x
            x, bias = balls.scaled(spec.norm.gain, x), spec.norm.bias
            return x if bias is None else Split(plus(x.first, balls.exact(bias)), x.rest)

        return state.each(norm)

    def add(self, layer: Layer, spec: ResidualSpec, state: Tokens, part: Tokens) -> Tokens:
        """γ part + λ state·[skip], in the groups of the one that has more."""
        part = part.each(partial(balls.scaled, spec.branch_gain))
        if not spec.skip:
            return part
        state = state.each(partial(balls.scaled, spec.skip_gain))
        groups = max(part.groups, state.groups, key=len)
        part, state = part.regrouped(groups), state.regrouped(groups)
        steps = {i: plus(step, state.steps[i]) for i, step in part.steps.items()}
        return Tokens(plus(part.first, state.first), steps, groups)

    def attention(self, layer: Layer, branch_input: Tokens) -> tuple[Tokens, None]:
        """Σ_h P_h X W_h + b_o, in new groups."""
        found = BallAttention(
            layer.params.attention,
            branch_input,
            layer.config,
            jax.tree.map(np.asarray, layer.context),
            layer.gains.temperature,
        )
        first = branch_input.groups[0][0]
        return balls.grown(found.outputs, len(branch_input.steps) + 1, first), None

    def mlp(self, layer: Layer, branch_input: Tokens) -> tuple[Tokens, None]:
        """φ(x W_in + b_in) W_out + b_out, gated or with experts."""
        p, kind, routing = layer.params.mlp, layer.config.mlp, layer.config.routing

        def of(x):
            hidden = affine(x, p.w_in, p.b_in)
            if kind in layers.GATED:
                gate = affine(x, p.w_gate, p.b_gate)
                hidden = balls.times(balls.activated(layers.GATED[kind], gate), hidden)
            else:
                hidden = balls.activated(kind, hidden)
            if routing is not None:
                hidden = balls.times(hidden, balls.unit_shares(p, x, routing))
            return affine(hidden, p.w_out, p.b_out)

        return branch_input.each(of), None


def _log10_residual(state: Tokens, exists: np.ndarray) -> tuple[float, float] | None:
    """(log10 ‖res‖_{1,∞}, its radius) of the tokens that exist; None where the ball is wide."""
    away = state.differences(state.groups[0][0])
    rows = [row for row, there in zip(away, exists, strict=True) if there]
    mean = [total(column) / len(rows) for column in zip(*rows, strict=True)]
    rest = [[abs(v) for v in minus(row, mean)] for row in rows]
    sums = (map(total, rest), map(total, zip(*rest, strict=True)))
    size = reduce(arb.max, sums[0]) * reduce(arb.max, sums[1])
    if size == 0:
        return -np.inf, 0.0
    if not size > 0:
        return None
    log = size.log() / 2 / arb.const_log10()
    value = float(log.mid())
    radius = float(np.nextafter(float((log - value).abs_upper()), np.inf))
    return (value, radius) if radius <= NARROW * max(1.0, abs(value)) else None
