"""Measurements layer by layer, of one example and of a batch of padded texts.

Axis letters: b examples, l layers (0 is the embedding), n tokens, d width.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from rank_collapse import residuals
from rank_collapse.config import TransformerConfig
from rank_collapse.network import TransformerParams, apply

# name -> measure(x [n, d], mask=[n]) of the tokens of one layer
MEASURES: dict[str, Callable] = {
    "residual_ratio": lambda x, mask: residuals.residual_ratio(x, mask=mask),
    "token_cosine": residuals.token_cosine,
    "effective_rank": residuals.effective_rank,
    "stable_rank": residuals.stable_rank,
}


def hidden_profile(
    hidden: Float[Array, "l n d"], mask: Any = None, measures: tuple[str, ...] = ("residual_ratio",)
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
    return hidden_profile(trace.hidden, mask, measures)


def batched(
    measure: Callable[..., Any], params: Any, config: Any, inputs: Mapping[str, Any], chunk: int = 8
) -> Iterator[Any]:
    """measure(params, config, **one example) over a batch, a chunk at a time, as numpy trees.

    Everything with a leading axis b goes into `inputs`; the last chunk is filled up with repeated
    examples, so that one compiled program serves all, and cut again.

    Args:
        measure: A function of one example, without side effects.
        params: Passed on, never copied.
        config: Passed on.
        inputs: Arrays [b, ...] by argument name; None for an argument that is absent.
        chunk: Examples at once: bounds the memory.

    Yields:
        Trees of arrays [chunk or less, ...].
    """
    given = {k: np.asarray(v) for k, v in inputs.items() if v is not None}
    total = {len(v) for v in given.values()}
    if len(total) != 1:
        raise ValueError(f"inputs of different lengths: { {k: len(v) for k, v in given.items()} }")
    (total,) = total
    chunk = min(chunk, total)

    @jax.jit
    def run(params, config, examples):
        return jax.vmap(lambda one: measure(params, config, **one))(examples)

    for start in range(0, total, chunk):
        rows = np.minimum(np.arange(start, start + chunk), total - 1)
        found = run(params, config, {k: v[rows] for k, v in given.items()})
        kept = min(chunk, total - start)
        yield jax.tree.map(lambda a, kept=kept: np.asarray(a)[:kept], found)


def measure_batch(
    measure: Callable[..., Any], params: Any, config: Any, inputs: Mapping[str, Any], chunk: int = 8
) -> Any:
    """`batched`, its chunks joined: a tree of numpy arrays [b, ...]."""
    parts = list(batched(measure, params, config, inputs, chunk))
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

    def measure(params, config, x, **rest):
        return network_profile(params, x, config, measures=measures, **rest)

    return measure_batch(measure, params, config, inputs, chunk)
