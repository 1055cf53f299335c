"""What the theory says of one example, as plain arrays for `profiles.measure_batch`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.theory.bounds import require_w_qk
from rank_collapse.theory.logdomain import require_log_pass
from rank_collapse.theory.reports import BoundReport, bound_report


def has_bounds(config: TransformerConfig) -> bool:
    """Whether there is a matrix W_QK that the bounds can use; see `reports.bound_report`."""
    try:
        require_w_qk(config)
    except ValueError:
        return False
    return not config.cross_attention


def has_log_profile(config: TransformerConfig) -> bool:
    """Whether there is a residual in logarithms; see `logdomain.log_residual_profile`."""
    try:
        require_log_pass(config)
    except ValueError:
        return False
    return True


def bound_effects(
    params: TransformerParams, x: Any, config: TransformerConfig, *, mask: Any = None
) -> dict[str, Float[Array, "..."] | Bool[Array, "..."]]:
    """β, γ*, the condition of the technical lemma and the bounds, per layer and head.

    Args:
        params, x, config: As in `rank_collapse.apply`.
        mask: Bool [n], the tokens that exist.

    Returns:
        Fields of `reports.BoundReport`, log10_spread as its maximum over tokens.

    Raises:
        ValueError: Rotary or relative positions, or cross-attention: see `reports.bound_report`.
    """
    return effects_of(bound_report(params, x, config, mask=mask))


def effects_of(found: BoundReport) -> dict[str, Float[Array, "..."] | Bool[Array, "..."]]:
    """The fields of a report that `bound_effects` names."""
    names = ("beta", "gamma", "admissible", "log10_input")
    return {name: getattr(found, name) for name in names} | {
        "log10_spread": jnp.max(found.log10_spread, axis=-1),
        "head_tightness": found.head.tightness,
        "layer_tightness": found.layer.tightness,
        "layer_log10_lhs": found.layer.log10_lhs,
        "layer_log10_rhs": found.layer.log10_rhs,
        "stack_log10_lhs": found.stack.log10_lhs,
        "stack_log10_rhs": found.stack.log10_rhs,
    }
