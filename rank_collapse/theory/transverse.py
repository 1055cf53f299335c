"""How fast a network moves nearly equal tokens together or apart: its transverse exponents.

Equal tokens stay equal, so directions across the diagonal {1xᵀ} have a separate linear map. Where
this map is 0, the residual falls by the cubic law (`cubic_law`); elsewhere, with skips and with
rows that see different keys, its Lyapunov exponent is the rate.

Axis letters: n tokens, d width, h heads, v value width, l layers, p directions.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rank_collapse.annotations import ArrayLike
from rank_collapse.checks import check_whole
from rank_collapse.network import attention as attn, covers
from rank_collapse.network.attention_weights import equal_weights, softmax
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import at_least_float32, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.walk import walk_layer, walk_layers
from rank_collapse.theory import tangent
from rank_collapse.theory.log_operations import LogState, around_mean


def transverse_exponents(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    count: int = 1,
    **inputs: ArrayLike | None,
) -> Float[Array, "p"]:
    """Compute the largest Lyapunov exponents across the diagonal, log10 per layer, largest first.

    Args:
        params, x, config, **inputs: See `transverse_growth`.
        count: Number of exponents.

    Raises:
        ValueError: In the cases of `transverse_growth`, whose first layers turn the directions
            towards the growing ones.
    """
    return jnp.mean(transverse_growth(params, x, config, count=count, **inputs), axis=0)


@full_precision
def transverse_growth(
    params: TransformerParams,
    x: ArrayLike,
    config: TransformerConfig,
    *,
    count: int = 1,
    **inputs: ArrayLike | None,
) -> Float[Array, "l p"]:
    """Compute log10 of how much each layer stretches orthogonal directions across the diagonal.

    Let x̄ be the mean token of x, which the network itself moves on. At equal tokens 1x̄ᵀ the map is
        R → λ R·[skip] + γ Σ_h (Q_h R − its mean row) W_h,
    Q_h what mixes equal tokens (P, or M of `Mixing`), then the Jacobians of norms and MLPs at x̄.
    The first direction begins as the residual of x, the others at random. Gram-Schmidt after every
    layer keeps them orthogonal; the logarithms of their lengths before it are the growth. It is
    −inf, exactly, where there is no skip and the rows of each Q_h are the same, or 0: there the
    residual falls faster than exponentially.

    Args:
        params, x, config: See `apply`; any scores, mask, norm, gains and MLP.
        count: Directions.
        **inputs: mask, bias, segments and positions of `apply`.

    Returns:
        [L, count]; its cumulative sums are how a small residual behaves by layer.

    Raises:
        ValueError: Cross-attention; count not between 1 and (n − 1) d; inputs of the wrong shape.
    """
    params, prepared = prepare_inputs(params, x, config, covers=LinearAttention.covers, **inputs)
    params, prepared = at_least_float32(params, prepared)
    n, d = prepared.x.shape
    count = check_whole("count", count, 1, (n - 1) * d)
    return _measure_growth(params, prepared, config, count)


@functools.partial(jax.jit, static_argnames="count")
def _measure_growth(params, prepared, config, count):
    """Compute `transverse_growth`, as one program.

    Args:
        params, prepared, config: See `prepare_inputs`.
        count: Number of directions: the residual of the input, and count − 1 random ones.

    Returns:
        log10 of the growth of each direction in each layer, [L, count].
    """
    keep = prepared.existing_tokens
    start = around_mean(prepared.x, keep)
    shape = (count - 1, *prepared.x.shape)
    random_directions = jax.random.normal(jax.random.key(0), shape, prepared.x.dtype)
    directions = jnp.concatenate([start.residual[None], random_directions])
    directions = jax.vmap(
        lambda r: tangent.renormalise_residual(start.mean, r, 0.0, keep).residual
    )(directions)
    directions, _ = orthonormalise_directions(directions)

    def step(layer, carry):
        """Passes mean and directions through a layer.

        Returns:
            ((mean, directions), log10 of the growth of each direction).
        """
        mean, directions = carry
        zero = jnp.zeros((), mean.dtype)

        def push(r):
            return walk_layer(LinearAttention(), layer, LogState(mean, r, zero))[0]

        after = jax.vmap(push)(directions)
        directions, stretch = orthonormalise_directions(after.residual)
        return (after.mean[0], directions), jnp.log10(stretch) + after.log_scale / math.log(10)

    return walk_layers(step, (start.mean, directions), params, prepared, config)[1]


def orthonormalise_directions(directions: Float[Array, "p n d"]) -> tuple[Array, Float[Array, "p"]]:
    """Orthonormalise directions by Gram and Schmidt.

    Args:
        directions: [p, n, d]; the first one keeps its direction.

    Returns:
        The orthonormal directions, and the length of each before it was normalised [p].
    """
    basis, lengths = [], []
    for direction in directions:
        for _ in range(2):  # the second time for what rounding left
            for unit in basis:
                direction = direction - jnp.sum(direction * unit) * unit
        length = jnp.sqrt(jnp.sum(jnp.square(direction)))
        basis.append(direction / jnp.where(length == 0, 1, length))
        lengths.append(length)
    return jnp.stack(basis), jnp.stack(lengths)


def subtract_first_row(weights: Float[Array, "h n n"], keep: ArrayLike) -> Float[Array, "h n n"]:
    """Subtract the row of the first token that exists: what rows share moves no difference.

    Args:
        weights: Attention weights [h, n, n].
        keep: Bool [n], the tokens that exist.
    """
    return weights - weights[:, jnp.argmax(keep)][:, None, :]


class LinearAttention(tangent.Tangents):
    """SA(1x̄ᵀ) and Σ_h Q_h R W_h, Q_h less one of its rows: exactly 0 where all rows are the same.

    Of `Mixing` Q = α I + β P + γ C in the form α I + (β + γ) C + β (P − C): equal tokens without
    biases and positions have P = C, and variants with β = −γ are α I to the last digit.
    """

    covers = covers.Covers(
        "a transverse exponent",
        # A caller's M may depend on the tokens even where they are equal. Weights whose rows do
        # not sum to a constant make equal tokens differ.
        covers.all_fields_but(*covers.CROSS, "normalise", "mix", "rotary_layers"),
    )

    def apply_attention(self, layer, branch_input):
        """Apply attention to equal tokens 1x̄ᵀ, and its linearisation there to the residual R.

        At equal tokens the weights P do not depend on R to first order, so R becomes Σ_h P_h R W_h.
        The row of the first token is subtracted from P: what all rows share moves no difference
        between tokens. `Mixing` replaces P by α I + β P + γ C with uniform weights C.

        Returns:
            (the state, no further results: None).
        """
        params, context, keep = layer.params.attention, layer.context, layer.inputs.existing_tokens
        n, dtype = branch_input.residual.shape[0], branch_input.residual.dtype
        mixing = layer.gains.mixing
        if context.rotary is None and context.relative is None:
            weights = equal_weights(context, n, n, dtype)
        else:
            tokens = jnp.broadcast_to(branch_input.mean[None, :], branch_input.residual.shape)
            scores = attn.attention_scores(
                params, tokens, tokens, context=context, **layer.score_options
            )
            weights = softmax(scores, context.mask)
        differences, row_sum = subtract_first_row(weights, keep), 1.0
        if mixing is not None:
            uniform = equal_weights(context.replace(bias=None), n, n, dtype)
            row_sum = mixing.identity + mixing.weights + mixing.uniform
            weights_gain = jnp.reshape(mixing.weights, (-1, 1, 1))
            uniform_gain = jnp.reshape(mixing.weights + mixing.uniform, (-1, 1, 1))
            differences = (
                weights_gain * subtract_first_row(weights - uniform, keep)
                + uniform_gain * subtract_first_row(uniform, keep)
                + jnp.reshape(mixing.identity, (-1, 1, 1)) * jnp.eye(n, dtype=dtype)[None]
            )
        values = jnp.einsum("md,hdv->hmv", branch_input.residual, params.w_v)
        differences = jnp.broadcast_to(differences, (values.shape[0], n, n))
        residual = jnp.einsum("hnm,hmv,hvd->nd", differences, values, params.w_o)
        mean = tangent.attend_equal_tokens(params, branch_input.mean, row_sum)
        return LogState(mean, residual, branch_input.log_scale), None
