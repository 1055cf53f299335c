"""Residuals far below the range of floating point: tokens as 1x̄ᵀ + e^s R̂.

The residual of pure attention shrinks like its cube in every layer; float32 sees two or three
layers of that, float64 not many more. Here the mean token x̄, a mantissa R̂ (columns that sum to
0, largest entry 1) and a log scale s are carried through every operation of the network. Each
operation subtracts no nearly equal numbers, and stays right where ε = e^s underflows to 0.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse import checks, struct
from rank_collapse.annotations import AnyArray, ArrayLike, Leaf, Number, Tree
from rank_collapse.measures.arrays import as_floats, namespace
from rank_collapse.network import covers
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import PreparedInputs, at_least_float32, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import LayerPass, WalkResult, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Algebra, Layer, walk_layer
from rank_collapse.theory import log_operations as ops
from rank_collapse.theory.log_attention import attention_parts
from rank_collapse.theory.noise import Noise, make_copies, mask_uncertain

# Noisy copies of the pass, which show where rounding has spoilt it. Only the states that branches
# read are moved, not what branches compute on the way. Copies then scatter about twice as far as
# float32 is off (medians of 64 Transformers of 12 layers without norms, at the default weights). So
# several copies are needed, which agree closely. Numbers off by more than 0.01 decades that got
# through there: 1.3 of 64 with two copies, 0.25 with three, none with four. Larger moves or a
# narrower tolerance do less.
REPLICAS = 4


class LogTrace(struct.Struct):
    """The values of every layer that the bounds need; residuals are log10 ‖.‖_{1,∞}."""

    profile: Leaf  # Of X^0 .. X^L, [L + 1]
    inputs: ops.LogState  # Of the input of each layer's attention, with a leading layer axis
    # Of P_h X W_h, less three times the log scale of the layer's input, [L, h]: the difference is
    # what float32 can hold in deep layers
    heads: Leaf
    branches: Leaf  # Of SA(X), before the branch gain, in the same way, [L]
    diameters: Leaf  # log10 of the largest ℓ2 distance of two tokens of X^0 .. X^L, [L + 1]
    input_diameters: Leaf  # Of the input of each layer's attention, less its log scale, [L]
    branch_diameters: Leaf  # Of SA(X), less three times the log scale as in `branches`, [L]


def log_residual_profile(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    replicas: int = REPLICAS,
    **inputs: ArrayLike | None,
) -> Float[Array, "l"]:
    """Compute log10 ‖res(X^l)‖_{1,∞} for l = 0..L, however small, around the mean token.

    Tokens are X = 1x̄ᵀ + ε R̂ with ε = e^s. Scores are, up to what is constant along a row, the
    sum of a common row g and ε² δ. Then the attention weights are
        softmax(g + ε² δ) = q + ε² E,
        g = ε R̂W_K(x̄W_Q + b_Q)ᵀ/√k,    δ = R̂W_Q(R̂W_K)ᵀ/√k,
        E_ij = q_j (M_ij − Σ_j q_j M_ij)/(1 + ε² Σ_j q_j M_ij),    M = expm1(ε² δ)/ε².
    The new residual is ε³ Σ_h E R̂ W_h. So s becomes 3s + a constant: the doubly exponential rate.

    A causal or local mask, a position bias, rotary and relative positions make rows differ by
    themselves. They give each row its own q and add ε (Q − 1q_refᵀ) R̂ W_h: an exponential rate.
    `Mixing` α I + β P + γ C has one too: R' = αR + βPR + γCR, as its rows sum to a constant. The
    rest of the network is treated exactly too.

    Arithmetic is that of x and the parameters, at least float32. The log scale has a relative
    accuracy of about 1e-6 in float32. Where large weights make scores of size S and all rows read
    one key, the logarithm has their error, 1e-7 S. The result is −inf beyond 3^80, near float32's
    largest number, and where a residual is 0. It is NaN where the mean token overflows.

    R̂ has one scale. Of tokens in clusters, distances within a cluster are kept relative to those
    between clusters. The result is NaN from the first layer whose residual depends on such
    distances: noisy copies of the pass (`noise`) then disagree. `exact_profile` covers such
    networks too.

    Args:
        params, x: See `apply`.
        config: The network; `skip_gain`, `branch_gain` and `temperature` may be traced.
        replicas: Noisy copies, each of which takes as long as the pass itself. With 0, 6 of 2016
            networks drawn at weight scales .3 to 6 got wrong numbers instead of NaN. With the
            default none did.
        **inputs: mask (Bool [n]: which tokens exist, the others are left out of the residual;
            [n, n] or [h, n, n]), bias, segments and positions of `apply`.

    Returns:
        [L + 1] decimal logarithms; jit at the outside, vmap over seeds.

    Raises:
        ValueError: Cross-attention, additive or capped scores, a mixture of experts, an attention
            of the caller's own (`mix`), edits, or inputs of the wrong shape.

    Source: the rate follows theorems 2.2 and 2.3 of Dong et al. 2021.
    """
    return log_trace(params, x, config, replicas=replicas, **inputs).profile


@full_precision
def log_trace(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    replicas: int = REPLICAS,
    **inputs: ArrayLike | None,
) -> LogTrace:
    """Compute the full result of `log_residual_profile`'s pass, heads and branches included.

    Args:
        params, x, config, replicas, **inputs: See `log_residual_profile`.
    """
    replicas = checks.check_whole("replicas", replicas, 0)
    params, prepared = prepare_inputs(params, x, config, covers=LogScaled.covers, **inputs)
    params, prepared = at_least_float32(params, prepared)
    return run_pass(LogPass(replicas), params, prepared, config)


class LogScaled(Algebra):
    """Tokens as 1x̄ᵀ + e^s R̂: states are `LogState`, branches `LogParts`, read with noise."""

    covers = covers.Covers(
        "a residual in logarithms",
        covers.SIZES
        | covers.STREAM
        | covers.PARALLEL
        | covers.MASKS
        | covers.POSITIONS
        | covers.MIXING
        | covers.MLPS
        | covers.at_any_value("scale_scores", "temperature", "qk_norm"),
    )

    def __init__(self, keep: ArrayLike, noise: Number | None = None):
        self.keep = keep
        self.noise = (lambda a: a) if noise is None else noise

    def apply_norm(self, layer, spec, state):
        """Normalise a state, or the parts of a branch's output, written as a mean and e^s times a
        residual."""
        apply_norm = ops.normalise_branch if spec.after_branch else ops.apply_norm
        return apply_norm(spec, state, self.keep)

    def add_branch(self, layer, spec, state, part):
        """Add the parts of a branch to the state, in logarithms of their scales."""
        return ops.add_branch(spec, state, part, self.keep)

    def apply_attention(self, layer, branch_input):
        """Apply attention: (the parts of its output, (the input, the parts by head, the parts)).

        Noise of rounding's size is added to the input, which shows digits that rounding may have
        cost.
        """
        branch_input = jax.tree.map(self.noise, branch_input)
        part, heads = attention_parts(
            layer.params.attention,
            branch_input,
            layer.config,
            layer.context,
            layer.gains,
            self.keep,
        )
        return part, (branch_input, heads, part)

    def apply_mlp(self, layer, branch_input):
        """Apply the MLP to an input with noise of rounding's size: (the parts of its output,
        None)."""
        part = ops.mlp_parts(
            layer.params.mlp, jax.tree.map(self.noise, branch_input), layer.config.mlp
        )
        return part, None


@dataclasses.dataclass(frozen=True)
class LogPass(LayerPass):
    """`log_trace` layer by layer; its profile is NaN where the profile of a noisy copy differs."""

    replicas: int = REPLICAS  # Noisy copies beside the pass itself
    reads_layer_values: ClassVar[bool] = False
    covers: ClassVar = LogScaled.covers

    def init_carry(self, prepared: PreparedInputs, config: TransformerConfig) -> ops.LogState:
        """Returns X^0 in every copy [c, ...]."""
        start = ops.around_mean(prepared.x, prepared.existing_tokens)
        return jax.tree.map(lambda a: jnp.stack([a] * (1 + self.replicas)), start)

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues | None, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Pass all copies through the layer.

        Returns:
            (states after the layer, (log10 of the norm of the state of every copy, fields of a
            `LogTrace` of the first copy)).
        """
        keep = layer.inputs.existing_tokens

        def run_copy(copy):
            """Passes one noisy copy through the layer.

            Returns:
                (its state, (log10 of the norm of the state, fields of a `LogTrace`)).
            """
            word, ulps, state = copy
            noise = Noise(word, ulps).at(layer.index) if self.replicas else None
            state, sublayers = walk_layer(LogScaled(keep, noise), layer, state)
            attention_input, heads, branch = _attention_residuals(sublayers["attention"], keep)
            mantissa = attention_input.replace(log_scale=jnp.zeros_like(attention_input.log_scale))
            layer_trace = (
                attention_input,
                heads,
                ops.log10_norm(branch),
                ops.log10_diameter(state),
                ops.log10_diameter(mantissa),
                ops.log10_diameter(branch),
            )
            return state, (ops.log10_norm(state), layer_trace)

        # One after the other: a batch of copies takes longer to compile and, on a CPU, to run.
        states, (profiles, layer_traces) = jax.lax.map(
            run_copy, (*make_copies(self.replicas), carry)
        )
        return states, (profiles, jax.tree.map(lambda a: a[0], layer_traces))

    def build_result(self, walk_result: WalkResult) -> LogTrace:
        """Return the trace of the first copy; its profile is NaN where noisy copies differ, because
        rounding decides the value there."""
        start = ops.around_mean(walk_result.prepared.x, walk_result.prepared.existing_tokens)
        profiles, layer_traces = walk_result.layer_results
        inputs, heads, branches, diameters, input_diameters, branch_diameters = layer_traces
        first = jnp.broadcast_to(ops.log10_norm(start), profiles[:1].shape)
        profile = jnp.concatenate([first, profiles]).T
        profile = mask_uncertain(profile) if self.replicas else profile[0]
        diameters = jnp.concatenate([ops.log10_diameter(start)[None], diameters])
        return LogTrace(
            profile, inputs, heads, branches, diameters, input_diameters, branch_diameters
        )


def local_rate(profile: ArrayLike) -> Float[AnyArray, "*s k"]:
    """Compute the order p of ‖res(X^{l+1})‖ ~ C ‖res(X^l)‖^p for l = 1 .. L−1; 3 in pure attention.

    p_l = (y_{l+1} − y_l) / (y_l − y_{l−1}) of y_l = log‖res(X^l)‖, in which neither C nor the unit
    and base matter. 1 for exponential decay; NaN after two equal residuals.

    Args:
        profile: y [..., L + 1], of three layers or more, of NumPy, JAX or torch.

    Returns:
        p [..., L − 1] in the framework of `profile`.
    """
    profile = as_floats(profile)
    xp = namespace(profile)
    change = profile[..., 1:] - profile[..., :-1]
    before = xp.where(change[..., :-1] == 0, xp.nan, change[..., :-1])
    return change[..., 1:] / before


def _attention_residuals(values, keep):
    """Compute the fields of a `LogTrace` for an attention sublayer, from its `SublayerValues`.

    Returns:
        (its input, log10 residuals of heads over e^{3s} [h], the branch's state over e^{3s}).
    """
    attention_input, heads, part = values.aux
    nothing = jnp.zeros_like(part.mean)
    scales = heads.scales_over_cube(attention_input.log_scale)

    def renormalise_channel(parts, scales):
        return ops.renormalise_parts(nothing, parts, scales, keep)

    def measure_head(parts, scales):
        return ops.log10_norm(renormalise_channel(parts, scales))

    head_residuals = jax.vmap(measure_head, in_axes=1)(heads.parts, scales)
    return attention_input, head_residuals, renormalise_channel(part.parts, scales.reshape(-1))
