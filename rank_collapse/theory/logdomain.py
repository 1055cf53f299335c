"""Residuals far below what floating point can hold: tokens as 1x̄ᵀ + e^s R̂.

The residual of pure attention shrinks like its cube in every layer; float32 sees two or three
layers of that, float64 not many more. Here the mean token x̄, a mantissa R̂ (columns that sum to
0, largest entry 1) and a log scale s are carried through every operation of the network, each in
a form that subtracts no nearly equal numbers and stays right where ε = e^s underflows to 0.

Axis letters: n tokens (queries), m keys, d width, h heads, k per-head query/key width, l layers.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import struct
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import Entry, enter, refuse_edit, refuse_fields
from rank_collapse.network.passes import Layer, run
from rank_collapse.network.precision import full_precision
from rank_collapse.network.sublayer import sites_of, sublayer
from rank_collapse.theory import log_operations as ops
from rank_collapse.theory.log_attention import attention, three_axes
from rank_collapse.theory.noise import Noise, certain, copies

# Noisy copies of the pass, which tell where rounding has spoilt it. Only the states that branches
# look at are moved, not what branches compute on the way: copies scatter about twice as far as
# float32 is off (medians of 64 Transformers of 12 layers without norms, at the default weights), so
# that they must agree more closely and several of them. Numbers off by more than 0.01 decades that
# got through there: 1.3 of 64 with two copies, 0.25 with three, none with four; larger moves or a
# narrower tolerance do less.
REPLICAS = 4


@struct.dataclass
class LogTrace:
    """What the bounds need of every layer; residuals as log10 ‖.‖_{1,∞}.

    Attributes:
        profile: Of X^0 .. X^L, [L + 1].
        inputs: LogState of what each layer's attention looks at, with a leading layer axis.
        heads: Of P_h X W_h, less three times the log scale of the layer's input, [L, h]: the
            difference is what float32 can hold in deep layers.
        branches: Of SA(X), before the branch gain, in the same way, [L].
        diameters: log10 of the largest ℓ2 distance of two tokens of X^0 .. X^L, [L + 1].
        input_diameters: Of what each layer's attention looks at, [L].
        branch_diameters: Of SA(X), less three times the log scale as in `branches`, [L].
        mask: Bool [h or 1, n or 1, m] of the scores, or None.
    """

    profile: Any
    inputs: Any
    heads: Any
    branches: Any
    diameters: Any
    input_diameters: Any
    branch_diameters: Any
    mask: Any


def log_residual_profile(
    params: Any, x: Any, config: TransformerConfig, *, replicas: int = REPLICAS, **inputs: Any
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
    are kept relative to those between clusters only. NaN from the layer on whose residual hangs on
    such distances: the pass is computed with noisy copies (`noise`), whose mean tokens and
    mantissas are moved in their last digits before every branch, and must agree with them. Of such
    networks `exact_profile` knows more.

    Args:
        params: Parameters of the network.
        x: Hidden states [n, d], or what `config.embedding` takes.
        config: The network; `skip_gain`, `branch_gain` and `temperature` may be traced.
        replicas: Noisy copies; each takes as long as the pass itself. 0: wrong without a sign in 6
            of 2016 networks drawn at weight scales .3 to 6, where the default had none wrong.
        **inputs: mask (Bool [n]: which tokens exist, the others are left out of the residual;
            [n, n] or [h, n, n]), bias, segments and positions of `apply`.

    Returns:
        [L + 1] decimal logarithms; jit at the outside, vmap over seeds.

    Raises:
        ValueError: Cross-attention, additive attention with rotary positions or normalised
            queries, capped scores, a mixture of experts, or inputs of the wrong shape.

    Source: the rate is that of Dong et al. 2021, theorems 2.2 and 2.3.
    """
    return log_trace(params, x, config, replicas=replicas, **inputs).profile


@full_precision
def log_trace(
    params: Any, x: Any, config: TransformerConfig, *, replicas: int = REPLICAS, **inputs: Any
) -> LogTrace:
    """The pass behind `log_residual_profile`, with each layer's attention input and branches.

    Args, Raises: See `log_residual_profile`.
    """
    require_log_pass(config)
    params, entry = enter(params, x, config, **inputs)
    refuse_edit(entry, "a residual in logarithms")
    dtype = jnp.promote_types(entry.x.dtype, jnp.float32)
    for leaf in jax.tree.leaves(params.layers):
        dtype = jnp.promote_types(dtype, leaf.dtype)
    params = jax.tree.map(lambda a: a.astype(dtype), params)
    entry = entry.replace(x=entry.x.astype(dtype))
    return _log_copies(params, entry, config, replicas)


def require_log_pass(config: TransformerConfig) -> None:
    """Refuses networks that have no residual profile in logarithms.

    Raises:
        ValueError: One.
    """
    if config.cross_attention:
        raise ValueError("cross_attention=True has a second input: no residual profile in logs")
    if config.score == "additive" and config.position == "rotary":
        raise ValueError("score='additive' with position='rotary' has no residual profile in logs")
    if config.score == "additive" and config.qk_norm != "none":
        raise ValueError(
            f"score='additive' with qk_norm={config.qk_norm!r} has no residual profile in logs"
        )
    refuse_fields(config, "a residual in logarithms", "score_cap", "num_experts")


@functools.partial(jax.jit, static_argnames="replicas")
def _log_copies(params, entry, config, replicas):
    return run(LogPass(replicas), params, entry, config)


@dataclasses.dataclass(frozen=True)
class LogPass:
    """`log_trace` layer by layer: a `LayerPass` with its own state, whose result is a `LogTrace`.

    Its profile is NaN where that of a noisy copy is another.

    Attributes:
        replicas: Noisy copies beside the pass itself.
    """

    replicas: int = REPLICAS
    forward: ClassVar[bool] = False

    def begin(self, entry: Entry, config: TransformerConfig) -> tuple[Any, Any]:
        """(X^0, the state of every copy [c, ...])."""
        require_log_pass(config)
        start = _begin(entry.x, _existing(entry))
        states = jax.tree.map(lambda a: jnp.stack([a] * (1 + self.replicas)), start)
        return start, states

    def step(
        self, layer: Layer, carry: Any, entry: Entry, config: TransformerConfig
    ) -> tuple[Any, Any]:
        """The states behind the layer; its fields of a `LogTrace`, the profile of every copy."""
        start, states = carry

        def copy(word, ulps, state):
            noise = Noise(word, ulps).at(layer.index) if self.replicas else lambda a: a
            state, (seen, heads, branch) = _layer(
                layer.params, state, config, layer.gains, entry, _existing(entry), noise
            )
            diameters = (ops.log10_diameter(a) for a in (state, seen, branch))
            return state, (
                ops.log10_norm(state), (seen, heads, ops.log10_norm(branch), *diameters)
            )  # fmt: skip

        states, (profiles, told) = jax.vmap(copy)(*copies(self.replicas), states)
        return (start, states), (profiles, jax.tree.map(lambda a: a[0], told))

    def finish(
        self, params: Any, last: Any, carry: Any, told: Any, entry: Entry, config: TransformerConfig
    ) -> LogTrace:
        """The first copy's trace; its profile where the others agree."""
        start, (profiles, (seen, heads, branches, diameters, *others)) = carry[0], told
        first = jnp.broadcast_to(ops.log10_norm(start), profiles[:1].shape)
        profile = jnp.concatenate([first, profiles]).T
        profile = certain(profile) if self.replicas else profile[0]
        diameters = jnp.concatenate([ops.log10_diameter(start)[None], diameters])
        mask = three_axes(entry.context.mask)
        return LogTrace(profile, seen, heads, branches, diameters, *others, mask)


def _existing(entry):
    return jnp.ones(entry.x.shape[0], bool) if entry.exists is None else entry.exists


def local_rate(profile: Any) -> Float[Array, "*s k"]:
    """log‖res(X^{l+1})‖ / log‖res(X^l)‖ for l = 0..L−1; it tends to 3 in pure attention.

    Means little in the first layers, where the logarithm passes 0.

    Args:
        profile: Logarithms [..., L + 1] to any base.
    """
    profile = jnp.asarray(profile)
    return profile[..., 1:] / profile[..., :-1]


def _begin(x, keep):
    """Tokens [n, d] around their mean; those that do not exist are 0."""
    x = jnp.where(keep[:, None], x, 0)
    center = jnp.sum(x, axis=0) / jnp.sum(keep)
    return ops.settle(center, (x - center[None, :])[None], jnp.zeros(1, x.dtype), keep)


def _layer(params, state, config, gains, entry, keep, noise):
    """One layer's state; its attention's input, residuals of heads and the branch over e^{3s}."""
    sites, start = sites_of(params, config, gains), state
    context = entry.context.of_layer(gains.window)

    def norm(site, state):
        of = ops.norm_of_branch if site.after_branch else ops.norm
        return of(site, state, keep)

    def add(site, state, part):
        return ops.add(site, state, part, keep)

    def moved(state):
        return state.replace(
            mean=noise(state.mean), rest=noise(state.rest), log_scale=noise(state.log_scale)
        )

    def attend(seen):
        seen = moved(seen)
        part, heads = attention(params.attention, seen, config, context, gains.temperature, keep)
        nothing = jnp.zeros_like(part.mean)
        scales = heads.scales_over_cube(seen.log_scale)

        def settled(parts, scales):
            return ops.settle(nothing, parts, scales, keep)

        by_head = jax.vmap(lambda *h: ops.log10_norm(settled(*h)), in_axes=1)(heads.parts, scales)
        return part, (seen, by_head, settled(part.parts, scales.reshape(-1)))

    def mlp(seen):
        return ops.mlp(params.mlp, moved(seen), config.mlp), None

    state, told = sublayer(sites.attention, state, attend, norm, add)
    if config.mlp != "none":
        state, _ = sublayer(sites.mlp, state, mlp, norm, add, start)
    return state, told
