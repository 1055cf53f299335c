"""Residual profiles of which every digit is proved: a network in ball arithmetic.

For networks and depths where `log_residual_profile` says NaN because rounding decides, and for
whoever wants to be sure. Needs python-flint, the extra `exact`.

Axis letters: n tokens (queries), m keys, d width, h heads, k per-head query/key width, l layers.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flint
import jax
import numpy as np
from flint import arb

from rank_collapse.network import layers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry, enter
from rank_collapse.network.gains import LayerGains, layer_gains
from rank_collapse.network.parameters import BlockParams
from rank_collapse.network.sublayer import Site, sites_of
from rank_collapse.theory import balls
from rank_collapse.theory.balls import Split, affine, dot, minus, plus, total

NARROW = 1e-12  # the largest radius of a proved logarithm, relative where it is above 1


@dataclasses.dataclass(frozen=True)
class ExactProfile:
    """log10 ‖res(X^l)‖_{1,∞} with what is proved of it.

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
    mask: Any = None,
    bias: Any = None,
    segments: Any = None,
    positions: Any = None,
    digits: int = 50,
    max_digits: int = 6400,
    max_seconds: float = 600.0,
) -> ExactProfile:
    """log10 ‖res(X^l)‖_{1,∞} for l = 0..L around the mean token, every digit proved; on the host.

    Tokens are kept as one of them and what the others differ from it by (`balls`), in ball
    arithmetic whose digits are doubled until the balls of the logarithms are narrower than 1e-12
    (relative above 1). The size of a residual takes no digits: 50 serve for one of 1e-14000. Tokens
    in clusters do, as many as the clusters are smaller than the distances between them.

    What is proved is the profile of the function that the formulas define at the numbers given:
    parameters, gains, X^0, biases, and the tables of rotary and relative positions in the dtype
    that JAX makes of them. Whether that function overflows in floating point plays no part.

    It takes about L (n d (2 h k + 2 h v + 3 f) + n² h (k + v)) multiplications of 0.1 µs at 50
    digits and n² h exponentials of 10 µs a layer, and 40 times as long with 1600 digits: see
    `estimated_seconds`.

    Args:
        params: Parameters of the network.
        x: Hidden states [n, d], or what `config.embedding` takes.
        config: The network.
        mask: As for `rank_collapse.apply`; tokens that a mask [n] leaves out are left out of the
            residual.
        bias, segments, positions: As for `rank_collapse.apply`.
        digits: Decimal digits of the first attempt.
        max_digits: Largest number of digits tried.
        max_seconds: No attempt is begun whose estimate is above; that of the first is an error.

    Returns:
        An `ExactProfile`.

    Raises:
        ValueError: Traced arrays, numbers that are not finite, cross-attention, digits that are no
            range, inputs of the wrong shape, or a first attempt that would take too long.
    """
    given = {"mask": mask, "bias": bias, "segments": segments, "positions": positions}
    _refuse_traced((params, x, config, given))
    _refuse_uncovered(config)
    if not 10 <= digits <= max_digits:
        raise ValueError(f"digits={digits} is not between 10 and max_digits={max_digits}")
    network, last_refused = _network(params, x, config, given), 0.0
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
    """What `exact_profile` takes for one attempt on one core, within a factor of about 2.

    Args:
        config: The network.
        num_tokens: n.
        digits: Of the arithmetic.
    """
    n, d, h, f = num_tokens, config.d_model, config.num_heads, config.d_ff
    k, v = config.qk_width, config.v_width
    units = 0 if config.mlp == "none" else f
    maps = 2 + (config.mlp in layers.GATED)
    products = n * d * (2 * h * (k + v) + maps * units) + n * n * h * (k + v)
    features = n * n * h * (k if config.score == "additive" else 1) + n * units
    entries = n * (8 * d + 2 * h * (k + v) + 4 * units)
    each = 6e-8 + 1.7e-7 * (digits / 200) ** 1.55, 2e-6 + 8e-5 * (digits / 1000) ** 1.5
    return config.depth * (products * each[0] + features * 3 * each[1] + entries * each[1] / 8)


# Fields of a configuration that the balls follow, at any value; others only at their default.
COVERED = frozenset(
    "depth num_heads d_model d_qk d_v d_ff mlp attention_skip mlp_skip cross_skip norm_placement "
    "norm norm_eps final_norm mask window score scale_scores qk_norm score_cap position "
    "rotary_theta rotary_scaling rotary_tables rotary_width rotary_factor windows local_theta "
    "num_buckets max_distance clamp_distance learned_per_feature parallel first_norm num_experts "
    "experts_per_token router d_shared layer_map embedding init unroll skip_gain branch_gain "
    "norm_gain learned_skip_gain learned_branch_gain temperature init_gain".split()
)


def _refuse_uncovered(config):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in COVERED and value != field.default:
            raise ValueError(f"exact_profile does not cover {field.name}={value!r}")


def _refuse_traced(arrays):
    if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(arrays)):
        raise ValueError("exact_profile takes concrete arrays: call it outside of jit and vmap")


class _Layer(NamedTuple):
    """One layer, with arrays of NumPy."""

    params: BlockParams
    gains: LayerGains
    index: int
    config: TransformerConfig
    inputs: Entry


def _network(params, x, config, given) -> list[_Layer]:
    """The layers of a network, checked."""
    params, entry = enter(params, x, config, **given)
    gains = layer_gains(config, entry.x.dtype, params)
    entry, gains, stack = jax.tree.map(np.asarray, (entry, gains, params.layers))
    arrays = {"x": entry.x, "bias": entry.context.bias, "params": stack, "config": gains}
    for name, tree in arrays.items():
        floats = (np.asarray(a, np.float64) for a in jax.tree.leaves(tree))
        if not all(np.isfinite(a).all() for a in floats):
            raise ValueError(f"{name} has values that are not finite")
    if entry.exists is not None and not entry.exists.any():
        raise ValueError(f"mask of shape {entry.exists.shape} leaves out every token")
    rows = config.layer_map or range(config.depth)
    return [
        _Layer(
            jax.tree.map(lambda a, row=row: a[row], stack),
            jax.tree.map(lambda a, l=l: a[l], gains), l, config, entry,
        )
        for l, row in enumerate(rows)
    ]  # fmt: skip


def _profile(network: list[_Layer]) -> Iterator[tuple[float, float]]:
    """(logarithm, radius) layer by layer, up to the first one that is not proved."""
    x, exists = network[0].inputs.x, network[0].inputs.exists
    exists = np.ones(len(x), bool) if exists is None else exists
    algebra = Balls(reference=int(np.argmax(exists)))
    state = balls.split(np.where(exists[:, None], x, x[algebra.reference]), algebra.reference)
    found = _log10_residual(state, exists)
    for layer in network:
        if found is None:
            return
        yield found
        try:
            state = _walk_layer(algebra, layer, state)
        except balls.Undecided:
            return
        found = _log10_residual(state, exists)
    if found is not None:
        yield found


def _walk_layer(algebra: "Balls", layer: _Layer, state: Split) -> Split:
    sites, start = sites_of(layer.params, layer.config, layer.gains), state
    for kind in layer.config.kinds:
        site = getattr(sites, kind)
        branch_input = start if site.parallel else state
        if site.norms_input and not (site.bare is not None and site.bare):
            branch_input = algebra.normalise(layer, site, branch_input)
        part, _ = getattr(algebra, kind)(layer, branch_input)
        if site.norms_branch:
            part = algebra.normalise(layer, site.at_branch, part)
        state = algebra.add(layer, site, state, part)
        if site.placement == "post":
            state = algebra.normalise(layer, site, state)
    return state


@dataclasses.dataclass(frozen=True)
class Balls:
    """Norms, sums, attention and MLPs of a `Split` state.

    Attributes:
        reference: The token that `Split.first` is.
    """

    reference: int

    def normalise(self, layer: _Layer, site: Site, state: Split) -> Split:
        """The norm of a site."""
        if site.kind == "layer":
            state = balls.centered(state)
        state = balls.normalised(state, site.eps)
        if site.norm is None:
            return state
        state = balls.scaled(site.norm.gain, state)
        bias = balls.row_of(site.norm.bias, len(state.first))
        return Split(plus(state.first, bias), state.rest)

    def add(self, layer: _Layer, site: Site, state: Split, part: Split) -> Split:
        """γ part + λ state·[skip]."""
        part = balls.scaled(site.branch_gain, part)
        return balls.added(balls.scaled(site.skip_gain, state), part) if site.skip else part

    def mlp(self, layer: _Layer, branch_input: Split) -> tuple[Split, None]:
        """φ(x W_in + b_in) W_out + b_out, gated or with experts."""
        p, kind, routing = layer.params.mlp, layer.config.mlp, layer.config.routing
        hidden = affine(branch_input, p.w_in, p.b_in)
        if kind in layers.GATED:
            gate = affine(branch_input, p.w_gate, p.b_gate)
            hidden = balls.times(balls.activated(layers.GATED[kind], gate), hidden)
        else:
            hidden = balls.activated(kind, hidden)
        if routing is not None:
            shares = balls.unit_shares(p, branch_input, routing, self.reference)
            hidden = balls.times(hidden, shares)
        return affine(hidden, p.w_out, p.b_out), None

    def attention(self, layer: _Layer, branch_input: Split) -> tuple[Split, None]:
        """Σ_h P_h X W_h + b_o."""
        p, config = layer.params.attention, layer.config
        context = jax.tree.map(np.asarray, layer.inputs.context.of_layer(layer.gains.window))
        h, d, k = p.w_q.shape
        v, n = p.w_v.shape[-1], len(branch_input.rest)
        content = affine(branch_input, _side_by_side(p.w_q))
        queries = Split(plus(content.first, balls.exact(p.b_q.ravel())), content.rest)
        keys = affine(branch_input, _side_by_side(p.w_k), p.b_k.ravel())
        values = affine(branch_input, _side_by_side(p.w_v), p.b_v.ravel())
        if p.q_norm is not None:
            queries = self._head_norm(p.q_norm, queries, h, config.norm_eps)
            keys = self._head_norm(p.k_norm, keys, h, config.norm_eps)
        mask = True if context.mask is None else context.mask
        mask = np.broadcast_to(mask, (h, n, n))
        mixed = []
        for head in range(h):
            parts = (a.columns(head * k, head * k + k) for a in (content, queries, keys))
            scores = _Scores(p, head, config, context, layer.gains.temperature, self.reference)
            value = values.columns(head * v, head * v + v)
            mixed.append(self._mixed(scores, *parts, value, mask[head]))
        return affine(balls.joined(mixed), p.w_o.reshape(h * v, d), p.b_o), None

    def _head_norm(self, gain, state, heads, eps):
        """RMSNorm of queries or keys: of each head (gain [k]) or over all heads ([h, k])."""
        k = len(state.first) // heads
        if gain.ndim == 2:
            return balls.scaled(gain.ravel(), balls.normalised(state, eps))
        each = (state.columns(i * k, i * k + k) for i in range(heads))
        return balls.joined([balls.scaled(gain, balls.normalised(a, eps)) for a in each])

    def _mixed(self, scores, content, query, key, value, allowed):
        """P (values) of a head: Σ_j p_j v_j and, as rows of P_i − p sum to 0, what they give of the
        values less that of the heaviest key, whose weight near 1 would cancel."""
        row, second = scores.of(content, query, key, allowed[self.reference])
        p, more = balls.softmax_differences(row, second, allowed, self.reference)
        heaviest = _heaviest(row, allowed[self.reference])
        others = [minus(v, value.rest[heaviest]) for v in value.rest]
        (first,) = balls.product([p], value.rest)
        return Split(plus(value.first, first), balls.product(more, others))


class _Scores(NamedTuple):
    """The scores of one head."""

    params: Any
    head: int
    config: TransformerConfig
    context: Any
    temperature: Any
    reference: int

    def of(self, content: Split, query: Split, key: Split, allowed: Any) -> tuple[list, list]:
        """(scores s_rj of the reference row [m], second differences against the heaviest key j*,
        s_ij − s_rj − s_ij* + s_rj*, [n][m]).

        Args:
            content: x W_q, which meets relative positions.
            query, key: With biases, normalised.
            allowed: Bool [m], the keys of the reference row.
        """
        r, context = self.reference, self.context
        if context.rotary is not None:
            query = balls.rotated(query, *context.rotary, r)
            key = balls.rotated(key, *context.rotary, r)
        factor = 1 / arb(float(self.temperature))
        if self.config.score == "dot" and self.config.scale_scores:
            factor /= arb(len(query.first)).sqrt()
        extra = self._relative(content)
        keys = [plus(key.first, c) for c in key.rest]
        row = [self._score(query.first, k) for k in keys]
        if extra is not None:
            row = plus(row, extra[r])
        row = [factor * s for s in row]
        bias = None if context.bias is None else balls.exact(context.bias[self.head])
        cap = None if context.cap is None else arb(float(context.cap))
        top = _heaviest(self._capped(row, cap, bias), allowed)
        shifts = [minus(c, key.rest[top]) for c in key.rest]
        across, down, second = self._differences(query, keys[top], shifts)
        if extra is not None:
            own = minus(extra[r], [extra[r][top]] * len(row))
            across = plus(across, own)
            down = [a + e[top] - extra[r][top] for a, e in zip(down, extra, strict=True)]
            second = [
                [s + e - e_top - o for s, e, o in zip(row_i, e_i, own, strict=True)]
                for row_i, e_i in zip(second, extra, strict=True) for e_top in (e_i[top],)
            ]  # fmt: skip
        second = [[factor * s for s in row_i] for row_i in second]
        if cap is not None:
            z, c = row[top] / cap, [factor * s / cap for s in across]
            second = [
                [
                    cap * (balls.tanh_second_difference(z, a, b)
                           + balls.tanh_change(z + a + b, t / cap))
                    for b, t in zip(c, row_i, strict=True)
                ]
                for row_i, s in zip(second, down, strict=True) for a in (factor * s / cap,)
            ]  # fmt: skip
        if bias is not None:
            own = minus(bias[r], [bias[r][top]] * len(row))
            second = [
                plus(row_i, minus(minus(b_i, [b_i[top]] * len(row)), own))
                for row_i, b_i in zip(second, bias, strict=True)
            ]
        return self._capped(row, cap, bias), second

    def _capped(self, row, cap, bias):
        row = row if cap is None else [cap * (s / cap).tanh() for s in row]
        return row if bias is None else plus(row, bias[self.reference])

    def _score(self, q, k):
        if self.config.score == "dot":
            return dot(q, k)
        v = balls.exact(self.params.v_score[self.head])
        return total(w * (a + b).tanh() for w, a, b in zip(v, q, k, strict=True))

    def _differences(self, query, key, shifts):
        """Of the scores: along the reference row from key j* on [m], along the column of j* from
        the reference on [n], and of both [n][m]; `shifts` are keys less that of j*."""
        if self.config.score == "dot":
            across = [dot(query.first, c) for c in shifts]
            down = [dot(a, key) for a in query.rest]
            return across, down, balls.times_columns(query.rest, shifts)
        v = balls.exact(self.params.v_score[self.head])
        z = plus(query.first, key)

        def change(u):
            return total(w * balls.tanh_change(a, b) for w, a, b in zip(v, z, u, strict=True))

        def both(a, c):
            terms = zip(v, z, a, c, strict=True)
            return total(w * balls.tanh_second_difference(*own) for w, *own in terms)

        second = [[both(a, c) for c in shifts] for a in query.rest]
        return list(map(change, shifts)), list(map(change, query.rest)), second

    def _relative(self, content):
        """Position and segment terms of the scores [n][n], see `attention.relative_scores`."""
        p, context, h = self.params.relative, self.context, self.head
        if p is None or context.relative is None:
            return None
        tokens = [plus(content.first, row) for row in content.rest]
        n = len(tokens)
        keys = balls.product(balls.exact(context.relative), balls.matrix(p.w_r[h]))
        b_r, b_s, kinds = (balls.exact(a) for a in (p.b_r[h], p.b_s[h], p.segment[:, h]))
        by_distance = balls.times_columns([plus(q, b_r) for q in tokens], keys)
        out = [[by_distance[i][n - 1 - (i - j)] for j in range(n)] for i in range(n)]
        if context.segments is None:
            return out
        differ = context.segments[:, None] != context.segments[None, :]
        by_kind = balls.times_columns([plus(q, b_s) for q in tokens], kinds)
        return [
            [s + by_kind[i][int(differ[i, j])] for j, s in enumerate(row)]
            for i, row in enumerate(out)
        ]


def _heaviest(row, allowed):
    """The allowed key of the largest score; the first where none is allowed."""
    keys = np.flatnonzero(allowed)
    return max(keys.tolist(), key=lambda j: row[j].mid()) if keys.size else 0


def _side_by_side(w):
    """[h, d, k] as [d, h k]."""
    return w.transpose(1, 0, 2).reshape(w.shape[1], -1)


def _log10_residual(state: Split, exists: np.ndarray) -> tuple[float, float] | None:
    """(log10 ‖res‖_{1,∞}, its radius) of the tokens that exist; None where the ball is wide."""
    rows = [row for row, there in zip(state.rest, exists, strict=True) if there]
    mean = [total(column) / len(rows) for column in zip(*rows, strict=True)]
    rest = [[abs(v) for v in minus(row, mean)] for row in rows]
    sums = (map(total, rest), map(total, zip(*rest, strict=True)))
    by_row, by_column = (_largest(list(group)) for group in sums)
    size = by_row * by_column
    if size == 0:
        return -np.inf, 0.0
    if not size > 0:
        return None
    log = size.log() / 2 / arb.const_log10()
    value = float(log.mid())
    radius = float(np.nextafter(float((log - value).abs_upper()), np.inf))
    return (value, radius) if radius <= NARROW * max(1.0, abs(value)) else None


def _largest(values):
    best = values[0]
    for v in values[1:]:
        best = best.max(v)
    return best
