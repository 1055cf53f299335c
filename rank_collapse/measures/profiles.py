"""Measurements layer by layer, of one example and of a batch of padded texts.

Axis letters: b examples, l layers (0 is the embedding), n tokens, d width.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.measures import residuals
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.transformer import apply

# name -> measure(x [n, d], mask=[n]) of the tokens of one layer
MEASURES: dict[str, Callable] = {
    "residual_ratio": lambda x, mask: residuals.residual_ratio(x, mask=mask),
    "token_cosine": residuals.token_cosine,
    "effective_rank": residuals.effective_rank,
    "stable_rank": residuals.stable_rank,
}


def hidden_profile(
    hidden: Float[Array, "l n d"],
    *,
    mask: Any = None,
    measures: tuple[str, ...] = ("residual_ratio",),
) -> dict[str, Float[Array, "l"]]:
    """Measures of every layer's tokens, padding left out.

    Args:
        hidden: Hidden states, X^0 first.
        mask: Bool [n], True for tokens that exist.
        measures: Names out of `MEASURES`.

    Raises:
        ValueError: An unknown measure.

    Source: Dong et al. 2021, figure 2 for the residual ratio.
    """
    unknown = [m for m in measures if m not in MEASURES]
    if unknown:
        raise ValueError(f"measure {unknown[0]!r} is not one of {tuple(MEASURES)}")
    return {m: jax.vmap(lambda x, m=m: MEASURES[m](x, mask=mask))(hidden) for m in measures}


def residual_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> Float[Array, "l"]:
    """‖res(X^l)‖ / ‖X^l‖ in ‖·‖_{1,∞}, l = 0 .. L, of one example.

    Args:
        params, x, config: As in `apply`.
        **inputs: `mask` (Bool [n]: the tokens that exist) and the other arguments of `apply`.
    """
    return network_profile(params, x, config, **inputs)["residual_ratio"]


def network_profile(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    measures: tuple[str, ...] = ("residual_ratio",),
    **inputs: Any,
) -> dict[str, Float[Array, "l"]]:
    """`hidden_profile` of a network's hidden states on one example.

    Args:
        params, x, config: As in `apply`.
        mask: Bool [n], the tokens that exist; they are the keys too.
        measures: Names out of `MEASURES`.
        **inputs: Other arguments of `apply`.
    """
    trace = apply(params, x, config, mask=mask, **inputs)
    return hidden_profile(trace.hidden, mask=mask, measures=measures)


@lru_cache(maxsize=64)
def _compiled(measure, static):
    """One program per measure and shape, however often it is called with other weights."""

    @jax.jit
    def run(params, config, examples):
        def one(example):
            example = dict(example)
            return measure(params, example.pop("x"), config, **example, **dict(static))

        return jax.vmap(one)(examples)

    return run


def measure_batch(
    measure: Callable[..., Any],
    params: Any,
    config: Any,
    inputs: Mapping[str, Any],
    *,
    chunk: int = 8,
    **static: Any,
) -> Any:
    """measure(params, x, config, **rest) on every example of a batch, a chunk at a time.

    The last chunk is filled up with repeated examples, so that one compiled program serves all.

    Args:
        measure: A pure function of one example; the same object again does not compile again.
        params, config: Passed on, never copied.
        inputs: Arrays [b, ...] by argument name, x among them; None for one that is absent.
        chunk: Examples at once: bounds the memory.
        **static: Further arguments of `measure`, hashable, the same for all examples.

    Returns:
        What `measure` returns, as numpy arrays [b, ...].

    Raises:
        ValueError: Inputs of different lengths.
    """
    given = {k: np.asarray(v) for k, v in inputs.items() if v is not None}
    lengths = {k: len(v) for k, v in given.items()}
    if len(set(lengths.values())) != 1 or not lengths["x"]:
        raise ValueError(f"inputs have different lengths, or none: {lengths}")
    total = lengths["x"]
    chunk = min(chunk, total)
    run = _compiled(measure, tuple(sorted(static.items())))
    parts = []
    for start in range(0, total, chunk):
        rows = np.minimum(np.arange(start, start + chunk), total - 1)
        found = run(params, config, {k: v[rows] for k, v in given.items()})
        parts.append(jax.tree.map(lambda a, n=total - start: np.asarray(a)[:n], found))
    return jax.tree.map(lambda *a: np.concatenate(a), *parts)


def batch_profiles(
    params: TransformerParams,
    config: TransformerConfig,
    inputs: Mapping[str, Any],
    *,
    measures: tuple[str, ...] = ("residual_ratio",),
    chunk: int = 8,
) -> dict[str, Float[np.ndarray, "b l"]]:
    """`network_profile` of every example of a batch.

    Args:
        params, config: The network.
        inputs: x [b, ...] and, where there is padding, mask [b, n]; other arguments of `apply`.
        measures: Names out of `MEASURES`.
        chunk: Examples at once: bounds the memory.
    """
    return measure_batch(network_profile, params, config, inputs, chunk=chunk, measures=measures)
