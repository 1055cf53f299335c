"""Equal tokens 1x̄ᵀ and a direction e^s R̂ across them: a network to first order in the residual.

What both laws of the small residual share: the cubic one (`cubic_law`) and the exponential one
(`transverse`) differ in the attention term alone. Norms and MLPs multiply by their Jacobian at x̄.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rank_collapse.network import layers
from rank_collapse.network.residual import apply_gain, normalize_tokens
from rank_collapse.network.transformer import Algebra
from rank_collapse.theory.log_operations import LogState


def renormalised(mean: Any, rest: Any, log_scale: Any, keep: Any) -> LogState:
    """Without the part along 1vᵀ, which stays along it ever after, and with max |rest| = 1."""
    rest = jnp.where(keep[:, None], rest, 0)
    rest = rest - (jnp.sum(rest, axis=0) / jnp.sum(keep))[None, :]
    rest = jnp.where(keep[:, None], rest, 0)
    size = jnp.max(jnp.abs(rest))
    safe = jnp.where(size == 0, 1, size)
    return LogState(mean, rest / safe, jnp.where(size == 0, -jnp.inf, log_scale + jnp.log(safe)))


def attended(params: Any, mean: Any, row_sum: Any = 1.0) -> Any:
    """SA(1x̄ᵀ), one token [d]: Σ_h s_h (x̄ W_V + b_V) W_O + b_O for weights whose rows sum to s_h."""
    values = jnp.einsum("d,hdv->hv", mean, params.w_v) + params.b_v
    return jnp.einsum("hv,hvd->d", jnp.reshape(row_sum, (-1, 1)) * values, params.w_o) + params.b_o


class Tangents(Algebra):
    """States are `LogState`; subclasses define attention, to the order that they need."""

    def apply_norm(self, layer, spec, state):
        """The value and the Jacobian at x̄."""
        return _pushed(lambda x: normalize_tokens(spec, x[None])[0], state)

    def add_branch(self, layer, spec, state, part):
        """γ part + λ state·[skip]; with a skip the two have one scale."""
        mean, rest = (
            apply_gain(spec.branch_gain, part.mean),
            apply_gain(spec.branch_gain, part.rest),
        )
        if spec.skip:
            mean = mean + apply_gain(spec.skip_gain, state.mean)
            rest = rest + apply_gain(spec.skip_gain, state.rest)
        return LogState(mean, rest, part.log_scale)

    def apply_mlp(self, layer, branch_input):
        """The value and the Jacobian at x̄."""
        params, config = layer.params.mlp, layer.config

        def of_token(x):
            return layers.apply_mlp(params, x[None], config.mlp, config.routing)[0]

        return _pushed(of_token, branch_input), None

    def edit_state(self, layer, name, state):
        config = layer.config
        if name == "residual" and config.mlp == "none":
            return state
        if name == "after_attention" and config.parallel and config.mlp != "none":
            return state  # a parallel MLP's part has the scale of the layer's input
        return renormalised(state.mean, state.rest, state.log_scale, layer.inputs.existing_tokens)


def _pushed(function, state):
    """A function of one token at the mean token, and its Jacobian on every row of the residual."""
    mean, push = jax.linearize(function, state.mean)
    return LogState(mean, jax.vmap(push)(state.rest), state.log_scale)
