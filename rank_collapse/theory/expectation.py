"""Rank collapse and instability as one law: tokens and what updates do to them, at any gains.

`expected_pass` is `apply` in expectation over the weights (`token_kernel`): of a network it takes
the gains, the mean squares of its matrices, the masks, and the kernel of its input. `collapse_law`
is its closed form for attention alone.

Axis letters: n tokens, m keys, d width, l layers, s sublayers (branches) in the order passed.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import checks, struct
from rank_collapse.annotations import ArrayLike, Leaf, Number
from rank_collapse.network import covers
from rank_collapse.network.attention_weights import equal_weights
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.layers import GATED
from rank_collapse.network.measured.updates import MATRICES
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import Algebra, apply_final_norm, walk_layer, walk_layers
from rank_collapse.theory import token_kernel
from rank_collapse.theory.score_overlap import overlap_ratios

# Under "branch" the branches read tokens that no norm has scaled: scores grow with the stream.
COVERS = covers.Covers(
    "expected_pass",
    covers.SIZES
    | covers.STREAM
    | covers.POSITIONS
    | covers.MLPS
    | covers.CROSS
    | covers.at_any_value("mask", "scale_scores", "temperature")
    | {"norm_placement": ("none", "pre", "post", "sandwich")},
)


class ExpectedTrace(struct.Struct):
    """The expected kernels of a network's tokens, layer by layer."""

    hidden: token_kernel.TokenKernel  # Of X^0 .. X^L, leaves [L + 1, ...]
    output: token_kernel.TokenKernel  # After the final norm, where there is one
    # [s], γ² Var f/(λ² Var x + γ² Var f), each branch's share in the sum it joins: β_ii²
    shares: Leaf

    @property
    def log_one_minus_cosine(self) -> Float[Array, "*b l"]:
        """Returns ln(1 − ρ_l), ρ the mean cosine of two different tokens; float32 has it to −87."""
        v, u = self.hidden.variance, self.hidden.distance
        s = jnp.sqrt(v)
        pair = s[..., :, None] * s[..., None, :]
        lengths = 0.5 * jnp.square(s[..., :, None] - s[..., None, :])
        one_minus_cosine = jnp.maximum(u - lengths, 0) / pair
        n = v.shape[-1]
        return jnp.log(jnp.sum(one_minus_cosine, axis=(-2, -1)) / (n * (n - 1)))

    @property
    def residual_ratio(self) -> Float[Array, "*b l"]:
        """Returns ‖res(X^l)‖_F/‖X^l‖_F by layer: Σ_i |x_i − x̄|² = Σ_ij |x_i − x_j|²/2n.

        The kernel does not determine ‖.‖_{1,∞}, which takes the largest rows and columns.
        """
        u, v = self.hidden.distance, self.hidden.variance
        return jnp.sqrt(jnp.mean(u, axis=(-2, -1)) / jnp.mean(v, axis=-1))

    @property
    def output_change(self) -> Float[Array, "*b l"]:
        """Returns E|δx̂_l|²/d of the normalised tokens, where the updates were given sizes."""
        changed = jnp.diagonal(self.hidden.change, axis1=-2, axis2=-1)
        return jnp.mean(changed / self.hidden.variance, axis=-1)


def update_sizes(config: TransformerConfig, size: Number = 1.0) -> dict[str, dict[str, Number]]:
    """Returns the same squared relative size for the update of every matrix: {part: {matrix: [L]}}.

    Args:
        size: ‖W* − W‖_F/‖W‖_F of each matrix of each layer.
    """
    checks.check_numbers("[0, inf]", arrays=True, size=size)
    layer_sizes = jnp.broadcast_to(jnp.square(jnp.asarray(size, jnp.float32)), (config.depth,))
    absent = () if config.mlp in GATED else ("w_gate",)
    return {
        part: {name: layer_sizes for name in MATRICES[part] if name not in absent}
        for part in config.kinds
    }


@full_precision
def expected_pass(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    sizes: ArrayLike | None = None,
    **inputs: ArrayLike | None,
) -> ExpectedTrace:
    """Compute the tokens of a network in expectation over its weights, sublayer by sublayer.

    Let K = E⟨x_i, x_j⟩/d of the stream, and K_f that of a branch. A sublayer is
        K' = N(λ² K + γ² K_f(K))       post-norm,
        K' = λ² K + γ² K_f(N(K))       pre-norm,
        N(K)_ij = K_ij/√(K_ii K_jj),
    with K_f of attention and MLPs as in `token_kernel`. Uniform attention over tokens of cosine ρ
    has K_f = ρ + (1 − ρ)/n for every pair: see `collapse_law`.

    Updates W* = W + δW move the tokens by δx. Each has a random direction and the squared relative
    size e. To first order in e, D = E⟨δx_i, δx_j⟩/d follows the same recursion, linear in D.

    Derived here: distances instead of cosines, the scores' part, and D. The scores' part is exact
    for tokens of equal length and cosine that see all keys. For others it is of second order,
    within the range of `token_kernel.score_noise`. One layer's predicted residual is .999 to 1.001
    of the measured one, and under a causal mask up to 1.28 of it at a variance of 13, 1.36 at 25
    and 1.41 at 35 (n = 3). Let the variances of a row's scores have the standard deviation τ over
    its keys: then it is .85 to 1.21
    at τ = .75, and up to 1.45 at the limit τ = 1 (n = 3 to 17).

    Assumed: weights are independent, of mean 0, and enter by their mean squares alone, in the limit
    of large d at n, H and L fixed. Biases of scores, relative-position terms and rotary positions
    act as at equal tokens. It fails for shared layers, for trained weights as far as they are
    correlated, where n L/d is not small, and in D for scores of large variance. It also fails in
    pure attention without skip, whose residual is of third order (see `log_residual_profile`).

    Args:
        params, x, config: See `apply`; of parameters mean squares are read, of x the kernel.
        sizes: Squared relative sizes of updates, as in `update_sizes`; None for no updates.
        **inputs: mask, bias, memory, memory_mask, segments and positions of `apply`. Tokens that
            do not exist get no attention, but are counted in the trace's means.

    Returns:
        The trace; NaN from the layer on whose scores are outside of the range, if arrays are
        traced.

    Raises:
        ValueError: Scores outside of the range, if no array is traced; additive scores; an edit;
            see also `apply`.

    Source: Noci et al. 2022, "Signal propagation in Transformers", for K of uniform attention;
    Cho and Saul 2009 for ReLU; Liu et al. 2020 for the output change that D predicts.
    """
    params, prepared = prepare_inputs(params, x, config, covers=COVERS, **inputs)
    sizes = update_sizes(config, 0.0) if sizes is None else sizes
    trace = _walk_kernels(params, prepared, config, sizes)
    variance = trace.hidden.variance
    if not isinstance(variance, jax.core.Tracer):
        is_lost = np.isnan(variance).any(axis=1)
        if is_lost.any() and not is_lost[0]:
            raise ValueError(
                f"expected_pass: variances of scores in layer {is_lost.argmax() - 1} are above "
                f"{token_kernel.LARGEST_VARIANCE:g} or differ between a row's keys by more than "
                f"{token_kernel.MOST_UNEVEN:g}: normalise tokens"
            )
    return trace


class Expected(Algebra):
    """Kernels of tokens under random weights; `Layer.extra` are the sizes of updates.

    `self_weights` [h, n, n] and `cross_weights` [h, n, m] are the weights of equal tokens.
    """

    def __init__(
        self,
        self_weights: ArrayLike,
        cross_weights: ArrayLike | None = None,
        memory: ArrayLike | None = None,
    ):
        self.self_weights, self.cross_weights, self.memory = self_weights, cross_weights, memory

    def apply_norm(self, layer, spec, state):
        """Normalise a kernel: divide tokens by the root of their expected mean square."""
        return token_kernel.normalise_kernel(spec, state)

    def add_branch(self, layer, spec, state, part):
        """Add the kernels of stream and branch, which are independent under random weights."""
        return token_kernel.add_kernels(spec, state, part)

    def apply_attention(self, layer, branch_input):
        """Compute the kernel of the output of self-attention; no further results: None."""
        return self._attend(layer, "attention", branch_input, branch_input, self.self_weights)

    def apply_cross(self, layer, branch_input):
        return self._attend(layer, "cross", branch_input, self.memory, self.cross_weights)

    def apply_mlp(self, layer, branch_input):
        sizes = layer.extra["mlp"]
        return token_kernel.mlp_kernel(
            layer.params.mlp, branch_input, layer.config.mlp, sizes
        ), None

    def _attend(self, layer, kind, branch_input, keys, weights):
        """Compute the kernel of an attention's output, in expectation over its weights.

        Args:
            layer: The layer; its `extra` are the squared relative sizes of updates, by kind.
            kind: "attention" or "cross".
            branch_input, keys: Kernels of the tokens that give queries, and keys and values.
            weights: Attention weights of equal tokens, [h, n, m].

        Returns:
            (the kernel, no further results: None).
        """
        out = token_kernel.attention_kernel(
            getattr(layer.params, kind),
            branch_input,
            keys,
            weights,
            layer.config,
            layer.gains.temperature,
            layer.extra[kind],
        )
        return out, None


@jax.jit
def _walk_kernels(params, prepared, config, sizes) -> ExpectedTrace:
    """Pass the kernel of the input through all layers, compiled.

    Args:
        params, prepared, config: See `prepare_inputs`.
        sizes: Expected sizes of the parameters of all layers, see `expected_pass`.
    """
    n, dtype = prepared.x.shape[0], prepared.x.dtype
    memory, cross_weights = None, None
    if config.cross_attention:
        memory = token_kernel.measure_kernel(prepared.memory)
        cross_weights = equal_weights(prepared.memory_context, n, len(prepared.memory), dtype)
    algebra = Expected(equal_weights(prepared.context, n, n, dtype), cross_weights, memory)
    start = token_kernel.measure_kernel(prepared.x)

    def step(layer, state):
        state, sublayers = walk_layer(algebra, layer, state)
        return state, (state, jnp.stack([_branch_share(values) for values in sublayers.values()]))

    last, (hidden, shares) = walk_layers(step, start, params, prepared, config, extra=sizes)
    output = apply_final_norm(algebra, last, params, prepared, config)
    hidden = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), start, hidden)
    return ExpectedTrace(hidden, output, shares.reshape(-1))


def _branch_share(values):
    """Compute the share of a branch in the variance of the sum of branch and skip, each with its
    gain; 1 without a skip.

    Args:
        values: `SublayerValues`, whose states are kernels: expected products of tokens.
    """
    spec, part = values.spec, values.branch_output
    if spec.norms_branch:
        part = token_kernel.normalise_kernel(spec.at_branch, part)
    branch = jnp.mean(jnp.square(spec.branch_gain)) * jnp.mean(part.variance)
    if not spec.skip:
        return jnp.ones_like(branch)
    skip = jnp.mean(jnp.square(spec.skip_gain)) * jnp.mean(values.state.variance)
    return branch / (skip + branch)


def collapse_law(
    cosine: Number,
    num_tokens: int,
    skip_gain: Float[Array, "s"],
    branch_gain: Float[Array, "s"],
    *,
    norm_placement: Literal["post", "pre"] = "post",
    score_variance: Number = 0.0,
) -> tuple[Float[Array, "s+1"], Float[Array, "s"]]:
    """Compute ln(1 − ρ) after 0 .. N attention sublayers, and each branch's share β_ii² of its sum.

    The skip keeps ω² of the tokens' differences. The branch has the variance σ² m, and differs
    between tokens as far as their attention weights do:
        1 − ρ' = (1 − ρ)(ω² + σ²(o_1 − o_ρ))/(ω² + σ² m),    m = ρ + (1 − ρ) o_1,
        o_1 = E Σ_j P_ij²,    o_ρ = E Σ_j P_ij P_kj.
    The overlaps o_1 and o_ρ are of Gaussian scores of variance b(1 − ρ). They hold at any n, within
    .1 % up to a variance of 16 and 1 % up to 36 (`overlap_ratios`).

    At b = 0 attention is uniform, and both overlaps are 1/n:
        1 − ρ' = (1 − ρ) ω²/(ω² + σ² m) = (1 − ρ)(1 − β_ii²),
        ln(1 − ρ_N) = ln(1 − ρ_0) + Σ_i ln(1 − β_ii²) ≤ ln(1 − ρ_0) − Σ_i β_ii².
    Post-norm tokens have variance 1. A pre-norm stream is not normalised: V' = λ² V + γ² m makes
    ω² = λ² V, and the share falls like 1/l.

    The output change after an update is proportional to Σ_i β_ii² (Liu et al. 2020, theorem 2). So
    one sum decides both. O(N) makes tokens equal like 2^−N, after an onset of log₂ n layers in
    which m grows from 1/n. O(log N) makes them equal like a power of 1/N, O(1) leaves a constant.

    Args:
        cosine: ρ_0, the mean cosine of two tokens; n tokens of one length have at least −1/(n − 1).
        num_tokens: n.
        skip_gain, branch_gain: λ or ω, and γ or σ, of each of the N sublayers.
        norm_placement: "post" or "pre".
        score_variance: b, the variance of a score of two independent tokens of variance 1: the
            gains of W_Q and W_K (1 each at `lecun`) over the squared temperature.

    Raises:
        ValueError: An unknown placement, no token, a cosine that n tokens cannot have, or a
            variance below 0.
    """
    checks.check_numbers("[1, inf)", arrays=True, num_tokens=num_tokens)
    # Cosines of float32 exceed their range by rounding.
    checks.check_numbers("[-1.00001, 1.00001]", arrays=True, cosine=cosine)
    mean_square = {"cosine + (1 - cosine)/num_tokens": cosine + (1 - cosine) / num_tokens}
    checks.check_numbers("[-1e-05, 1.00001]", arrays=True, **mean_square)
    checks.check_numbers("[0, inf]", arrays=True, score_variance=score_variance)
    checks.refuse_if(
        norm_placement not in ("post", "pre"),
        f"norm_placement={norm_placement!r} is not 'post' or 'pre'",
    )
    gains = jnp.stack([jnp.asarray(g, jnp.float32) for g in (skip_gain, branch_gain)], axis=1)
    start = jnp.log1p(-jnp.minimum(jnp.asarray(cosine, jnp.float32), 1))
    count = jnp.asarray(num_tokens, jnp.float32)
    score_variance = jnp.asarray(score_variance, jnp.float32)
    log_apart, shares = _iterate_collapse(start, gains, count, score_variance, norm_placement)
    return jnp.concatenate([start[None], log_apart]), shares


@functools.partial(jax.jit, static_argnames="norm_placement")
def _iterate_collapse(start, gains, count, score_variance, norm_placement):
    """Compute ln(1 − ρ) and the share β_ii² of the branch after every sublayer, [i] each.

    Args:
        start: ln(1 − ρ) of the input.
        gains: Gains of the skip and of the branch of every sublayer, [i, 2].
        count: Number of tokens, as a float.
        score_variance: Variance of a score of two independent tokens of variance 1.
        norm_placement: "post" or "pre".
    """
    other_share = 1 - 1 / count

    def step(carry, gains):
        """Passes one sublayer: (ln(1 − ρ), variance of the stream), and the share β_ii²."""
        log_apart, stream = carry
        skip, branch = jnp.square(gains[0]), jnp.square(gains[1])
        one_minus_cosine = jnp.exp(log_apart)  # 1 − ρ
        variance = score_variance * one_minus_cosine
        # o_1 − 1/n, and (o_1 − o_ρ)/(1 − ρ)
        overlap, gap = (
            ratio * variance * other_share / count
            for ratio in overlap_ratios(count, variance, 1 - one_minus_cosine)
        )
        m = 1 - one_minus_cosine * (other_share - overlap)
        total = skip * stream + branch * m
        share = branch * m / total
        # log1p(−share) for a share near 1 as exact as the skip's
        log_apart = log_apart + jnp.log((skip * stream + branch * gap * one_minus_cosine) / total)
        return (log_apart, total if norm_placement == "pre" else stream), (log_apart, share)

    return jax.lax.scan(step, (start, jnp.ones_like(start)), gains)[1]
