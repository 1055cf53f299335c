"""Measures of one layer by their names, NaN where tokens are not finite or too few."""

from collections.abc import Sequence

from rank_collapse.annotations import AnyArray
from rank_collapse.measures import spikes
from rank_collapse.measures.arrays import (
    is_jax_array,
    namespace,
)
from rank_collapse.measures.norms import num_tokens
from rank_collapse.measures.table import MEASURES

# Of one token these say nothing: NaN.
NEEDS_TWO_TOKENS = ("residual_ratio", "token_cosine", "bulk_ratio")


def measure_states(
    names: Sequence[str],
    x: AnyArray,
    mask: AnyArray | None = None,
    read: AnyArray | None = None,
    **choice: object,
) -> dict[str, AnyArray]:
    """Measure tokens [..., n, d]: NaN where they are not finite, or too few exist.

    Args:
        names: Names from `MEASURES`.
        x: The tokens.
        mask: Bool [..., n]; None for all.
        read, choice: Further arguments of `spikes.choose_tokens`, which chooses the tokens.

    Returns:
        {name: measure}. Also "left_out" and, with residual_ratio, "spiked", see `Profile`.
    """
    x, mask, left_out = spikes.choose_tokens(x, mask, read, **choice)
    flagged = ("residual_spike",) if "residual_ratio" in names else ()
    computed = tuple(dict.fromkeys((*names, *flagged)))
    if is_jax_array(x):
        from rank_collapse.measures import on_jax

        values = on_jax.compile_function(_measure_finite, (0,))(computed, x, mask)
    else:
        values = _measure_finite(computed, x, mask)
    notes = {} if left_out is None else {"left_out": left_out}
    if flagged:
        notes["spiked"] = values["residual_spike"] > 0.5
    return {name: values[name] for name in names} | notes


def _measure_finite(names, x, mask):
    """Compute measures of tokens by name; NaN where the tokens are not finite, or where a measure
    needs two tokens and has fewer."""
    xp = namespace(x)
    counted = x if mask is None else xp.where(mask[..., None], x, 0)
    finite = xp.all(xp.isfinite(counted), axis=(-2, -1))
    if not is_jax_array(x):  # which a measure refuses where its values are known
        x = xp.where(finite[..., None, None], x, 0)
    values = {}
    for name in names:
        if name not in NEEDS_TWO_TOKENS:
            values[name] = MEASURES[name](x, mask=mask)
        elif x.shape[-2] < 2:  # which a measure may refuse
            values[name] = xp.full_like(x[..., 0, 0], xp.nan)
        else:
            values[name] = xp.where(num_tokens(x, mask) < 2, xp.nan, MEASURES[name](x, mask=mask))
    return {name: xp.where(finite, a, xp.nan) for name, a in values.items()}


def measure_weights(
    names: Sequence[str],
    p: AnyArray,
    mask: AnyArray | None = None,
    key_mask: AnyArray | None = None,
) -> dict[str, AnyArray]:
    """Measure attention [..., h, n, m], means over heads.

    Args:
        names: Names from `MEASURES`.
        p: Weights.
        mask: Bool [..., n], the queries that exist; None for all.
        key_mask: Bool [..., m], the keys that exist; None for all.
    """
    options = {name: {"key_mask": key_mask} for name in ("first_column", "sink_rate")}
    values = {name: MEASURES[name](p, mask=mask, **options.get(name, {})) for name in names}
    return {name: a.mean(axis=-1) if a.ndim == p.ndim - 2 else a for name, a in values.items()}
