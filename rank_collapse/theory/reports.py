"""Every bound on one input: the paper's, those around the mean token, and the diameter's."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rank_collapse import struct
from rank_collapse.annotations import ArrayLike, Leaf, Tree
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.covers import Covers
from rank_collapse.network.inputs import at_least_float32, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import WalkResult, run_pass
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import LayerValues
from rank_collapse.network.walk import Layer, walk_layers
from rank_collapse.theory import bound_constants, bounds, mean_bounds
from rank_collapse.theory.bounds import PublishedSides, Sides
from rank_collapse.theory.log_attention import three_axes
from rank_collapse.theory.logdomain import LogPass, LogTrace
from rank_collapse.theory.mean_bounds import DiameterSides


class BoundReport(struct.Struct):
    """The bounds on one input; logarithms are decimal, residuals ‖.‖_{1,∞} around the mean token.

    All but two of the bounds hold for all weights wherever all rows share keys and biases.
    `head`, `layer` and `stack` are what the paper's lemma gives. Its condition `admissible` is not
    needed: `mean_head` and `mean_layer`, of the same residual, lie 2√2 n/(n − 1) or more below
    them, n tokens.
    `diameter_layer` and `diameter` bound the largest ℓ2 distance of two tokens.

    The two others, `published_layer` and `published_stack`, are the form of theorem 2.3: they have
    H max β max γ* in the place of two sums over heads. They do not follow from the lemma (see
    `bounds.layer_sides`); for one head they equal `layer` and `stack`. Where rows differ, bounds
    around the mean and of the diameter are refused: NaN, and `not_covered` says why.

    Attributes:
        beta: ‖W_QK,h‖_1 ‖W_h‖_{1,∞}, [L, h].
        lipschitz: λ of the MLP sublayer in ‖.‖_{1,∞}, [L]; 1 without MLP, inf for gated MLPs.
        gamma: γ*, the least γ with which the technical lemma gives the layer bound, [L, h]. It may
            exceed 1; then the bound with γ* is weaker than that with γ = 1.
        log10_spread: log10 of D_ii = max_{j,j'} |E_ij − E_ij'|, [L, h, n].
        admissible: max_i D_ii ≤ 1.2564312, the condition of the technical lemma, Bool [L, h].
        log10_residual: log10 of the residuals of X^0 .. X^L, [L + 1].
        log10_input: log10 of the residual at the input of each layer's attention, [L].
        log10_c: log10 of c_l, with which a layer's residual is at most c_l ‖R_l‖³, MLP and branch
            gain included, [L]; the stack's bound takes the largest.
        head: `PublishedSides` of P_h X W_h, each [L, h].
        layer: `Sides` of SA(X), each [L].
        stack: `Sides` of X^L, scalars.
        published_layer, published_stack: `PublishedSides` of the same.
        mean_head: `Sides` of P_h X W_h, each [L, h].
        mean_layer: `Sides` of SA(X), each [L].
        diameter_layer: `DiameterSides` of SA(X), each [L].
        diameter: `DiameterSides` of X^0 .. X^L from the diameter of X^0, each [L + 1]; skips are
            covered, norms and gated MLPs are not.
        stack_beta: max β λ |branch gain| over layers and heads, of the published form.
        stack_gamma: max γ*, of the published form.
        shrinks: Whether √c ‖res(X)‖ < 1, c = max c_l: below it the stack's bound falls with L.
        stack_admissible: Whether `admissible` holds for all heads and layers.
        not_covered: Reasons why the theorems do not cover this network; () if they do.
    """

    beta: Leaf
    lipschitz: Leaf
    gamma: Leaf
    log10_spread: Leaf
    admissible: Leaf
    log10_residual: Leaf
    log10_input: Leaf
    log10_c: Leaf
    head: PublishedSides
    layer: Sides
    stack: Sides
    published_layer: PublishedSides
    published_stack: PublishedSides
    mean_head: Sides
    mean_layer: Sides
    diameter_layer: DiameterSides
    diameter: DiameterSides
    stack_beta: Leaf
    stack_gamma: Leaf
    shrinks: Leaf
    stack_admissible: Leaf
    not_covered: tuple[str, ...] = struct.field(pytree_node=False, default=())


@full_precision
def bound_report(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
) -> BoundReport:
    """Compute every head's, layer's and the whole stack's bound on one input.

    Let R = res(X) of a layer's attention input and E = R W_QK Rᵀ/√k. The scores are E plus one
    vector g common to all rows, plus a constant along each row, which cancels in the softmax.
    Biases enter g alone, and so P̃ = 1 softmax(g)ᵀ, but not E. Then
        γ* = √k √(Σ_i D_ii · max_i D_ii) / (2 ‖W_QK‖_1 ‖R‖²_{1,∞}).
    The bounds are those of `bounds.layer_sides` and `bounds.stack_sides`, `mean_bounds.mean_sides`
    and `mean_bounds.diameter_sides`. The temperature is taken into W_QK, the branch gain into
    the stack's β and c. Where scores are not divided by √k, √k is 1.

    The theory covers attention whose rows all see the same keys: no mask, or padding (the padded
    rows are left out everywhere). Elsewhere the same formulas are evaluated (D over allowed keys)
    and `not_covered` says so. Skips and norms leave the layers' bounds valid, for SA(X) as a
    function of its input, but not the stack's.

    Args:
        params, x: See `apply`.
        config: The network, with dot-product scores; gains and temperature may be traced.
        mask: Bool [n] (which tokens exist), [n, n] or [h, n, n].
        bias: Float [h, n, n] added to the scores.

    Returns:
        A `BoundReport`; works under jit, and vmap over seeds and inputs.

    Raises:
        ValueError: Additive scores, rotary or relative-key positions, normalised queries and keys,
            cross-attention: there is no W_QK; capped scores, windows, parallel layers, experts;
            or inputs of the wrong shape.

    Source: Dong et al. 2021, theorems 2.2 and 2.3, corollary 3.2, and the technical lemma of the
    appendix; γ* is the least value for which the lemma's last step holds.
    """
    params, prepared = prepare_inputs(params, x, config, mask=mask, bias=bias, covers=bounds.COVERS)
    params, prepared = at_least_float32(params, prepared)
    return run_pass(BoundPass(), params, prepared, config)


@full_precision
def report_from_log(
    params: TransformerParams, x: ArrayLike, config: TransformerConfig, log: LogTrace
) -> BoundReport:
    """Compute `bound_report` from the pass in logarithms of the same arguments.

    Args:
        params, x, config: See `bound_report`.
        log: Result of `log_trace` for these arguments.
    """
    params, prepared = prepare_inputs(params, x, config, covers=bounds.COVERS)
    params, prepared = at_least_float32(params, prepared)
    return _report_from_trace(params, prepared, config, log)


@jax.jit
def _report_from_trace(params, prepared, config, log):
    """Walk the layers for the constants of their bounds, and build the report."""

    def step(layer, _):
        return (), _bound_constants(layer, layer.extra)

    _, constants = walk_layers(step, (), params, prepared, config, extra=log.inputs)
    return _build_report(log, constants, prepared, config)


@dataclasses.dataclass(frozen=True)
class BoundPass(LogPass):
    """`bound_report` layer by layer."""

    covers: ClassVar[Covers] = bounds.COVERS

    def measure_layer(
        self, layer: Layer, x: Array, layer_values: LayerValues | None, carry: Tree
    ) -> tuple[Tree, Tree]:
        """Compute the pass in logarithms, the constants of all bounds, and the layer's gains."""
        carry, log = super().measure_layer(layer, x, layer_values, carry)
        return carry, (log, _bound_constants(layer, log[1][0]))

    def build_result(self, walk_result: WalkResult) -> BoundReport:
        """Returns the report, with NaN in the bounds that do not hold for such a network."""
        log, constants = walk_result.layer_results
        trace = super().build_result(walk_result._replace(layer_results=log))
        return _build_report(trace, constants, walk_result.prepared, walk_result.config)


def _bound_constants(layer, state):
    """Compute the constants of all bounds of a layer.

    Args:
        layer: The layer.
        state: The state that its attention reads.

    Returns:
        (constants of the paper's bounds, constants of the bounds around the mean token, the layer's
        gains).
    """
    mask, keep = three_axes(layer.inputs.context.mask), layer.inputs.existing_tokens
    arguments = layer.params, state, layer.gains, layer.config
    allowed = keep[None, None, :] if mask is None else mask
    w_qk, _ = bound_constants.head_weights(layer.params.attention, layer.gains.temperature)
    spread = bound_constants.score_spread(w_qk, state, layer.config, allowed, keep)
    layer_constants = bound_constants.layer_constants(*arguments, spread)
    around_mean = mean_bounds.mean_constants(*arguments, spread, keep)
    return layer_constants, around_mean, layer.gains


def _build_report(trace, constants, prepared, config):
    """Build the report; bounds that do not cover the network are NaN.

    Args:
        trace: Trace of the network in logarithms.
        constants: `_bound_constants` of all layers.
        prepared, config: See `prepare_inputs`.
    """
    layer_constants, around_mean, gains = constants
    # A mask of tokens stands in the context with an axis of rows, as others do.
    mask = prepared.context.mask if prepared.token_mask is None else prepared.token_mask
    reasons = bounds.not_covered(config, mask=mask, bias=prepared.context.bias)
    admissible = jnp.max(layer_constants.log10_spread, axis=-1) <= math.log10(
        bounds.LEMMA_THRESHOLD
    )
    head, layer, published_layer = bounds.layer_sides(layer_constants, trace, config)
    log_scale = trace.inputs.log_scale
    mean_head, mean_layer = mean_bounds.mean_sides(around_mean, trace, log_scale)
    report = BoundReport(
        **bounds.stack_sides(layer_constants, trace.profile, gains, config),
        beta=layer_constants.beta,
        lipschitz=layer_constants.lipschitz,
        gamma=layer_constants.gamma,
        log10_spread=layer_constants.log10_spread,
        admissible=admissible,
        log10_residual=trace.profile,
        log10_input=layer_constants.log10_mantissa + layer_constants.log10_scale,
        head=head,
        layer=layer,
        published_layer=published_layer,
        mean_head=mean_head,
        mean_layer=mean_layer,
        diameter_layer=mean_bounds.diameter_layer_sides(around_mean, trace, log_scale),
        diameter=mean_bounds.diameter_sides(around_mean, trace.diameters, gains, config),
        stack_admissible=jnp.all(admissible),
        not_covered=reasons,
    )
    invalid = ()
    if any(reason.startswith("rows") for reason in reasons):
        invalid = ("mean_head", "mean_layer", "diameter_layer", "diameter")
    elif any(reason.startswith(("norms", "gated")) for reason in reasons):
        invalid = ("diameter",)
    return report.replace(**{n: mean_bounds.refuse_sides(getattr(report, n)) for n in invalid})
