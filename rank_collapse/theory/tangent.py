"""Equal tokens 1x̄ᵀ and a direction e^s R̂ across them: a network to first order in the residual.

The common part of both laws of the small residual: the cubic law (`cubic_law`) and the exponential
law (`transverse`) differ only in the attention term. Norms and MLPs multiply by their Jacobian at
x̄.
"""

import jax
import jax.numpy as jnp

from rank_collapse.annotations import ArrayLike, Leaf, Number
from rank_collapse.network import layers
from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.residual import apply_gain, normalise_tokens
from rank_collapse.network.walk import Algebra
from rank_collapse.theory.log_operations import LogState


def renormalise_residual(
    mean: ArrayLike, residual: ArrayLike, log_scale: Number, keep: ArrayLike
) -> LogState:
    """Remove the part along 1vᵀ, which stays along it ever after, and scale to max |residual| = 1.

    Args:
        mean: Mean token [d].
        residual, log_scale: Residual [n, d] over e^log_scale.
        keep: Bool [n], the tokens that exist.
    """
    residual = jnp.where(keep[:, None], residual, 0)
    residual = residual - (jnp.sum(residual, axis=0) / jnp.sum(keep, dtype=residual.dtype))[None, :]
    residual = jnp.where(keep[:, None], residual, 0)
    size = jnp.max(jnp.abs(residual))
    safe = jnp.where(size == 0, 1, size)
    return LogState(
        mean, residual / safe, jnp.where(size == 0, -jnp.inf, log_scale + jnp.log(safe))
    )


def attend_equal_tokens(params: AttentionParams, mean: ArrayLike, row_sum: Number = 1.0) -> Leaf:
    """Compute SA(1x̄ᵀ), one token [d]: Σ_h s_h (x̄ W_V + b_V) W_O + b_O.

    Args:
        params: `AttentionParams` of the layer.
        mean: x̄ [d].
        row_sum: s_h, the sum of each row in the weights of head h; a number or [h].
    """
    values = jnp.einsum("d,hdv->hv", mean, params.w_v) + params.b_v
    return jnp.einsum("hv,hvd->d", jnp.reshape(row_sum, (-1, 1)) * values, params.w_o) + params.b_o


class Tangents(Algebra):
    """States are `LogState`; subclasses define attention, to the order that they need."""

    def apply_norm(self, layer, spec, state):
        """Apply the norm to the mean token x̄, and its Jacobian there to the residual."""
        return _push_through(lambda x: normalise_tokens(spec, x[None])[0], state)

    def add_branch(self, layer, spec, state, branch_output):
        """Compute γ branch + λ state·[skip] of mean token and residual.

        With a skip, state and branch have one scale e^s, so the residuals can be added as they are.
        """
        mean = apply_gain(spec.branch_gain, branch_output.mean)
        residual = apply_gain(spec.branch_gain, branch_output.residual)
        if spec.skip:
            mean = mean + apply_gain(spec.skip_gain, state.mean)
            residual = residual + apply_gain(spec.skip_gain, state.residual)
        return LogState(mean, residual, branch_output.log_scale)

    def apply_mlp(self, layer, branch_input):
        """Apply the MLP to the mean token x̄, and its Jacobian there to each row of the residual.

        Returns:
            (the state, no further results: None).
        """
        params, config = layer.params.mlp, layer.config

        def apply_to_token(x):
            return layers.apply_mlp(params, x[None], config.mlp, config.routing)[0]

        return _push_through(apply_to_token, branch_input), None

    def edit_state(self, layer, name, state):
        """Renormalise the residual to max |R̂| = 1 after each sublayer that changes it.

        The walk calls this at the places where a caller's edit would be applied; this algebra takes
        no edits.
        """
        config = layer.config
        if name == "residual" and config.mlp == "none":
            return state
        if name == "after_attention" and config.parallel and config.mlp != "none":
            return state  # a parallel MLP's part has the scale of the layer's input
        return renormalise_residual(
            state.mean, state.residual, state.log_scale, layer.inputs.existing_tokens
        )


def _push_through(function, state):
    """Apply a function to the mean token, and its Jacobian to each row of the residual."""
    mean, push = jax.linearize(function, state.mean)
    return LogState(mean, jax.vmap(push)(state.residual), state.log_scale)
