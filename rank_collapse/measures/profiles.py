"""Measurements layer by layer, of one example and of a batch of padded texts.

Axis letters: b examples, l layers (0 is the embedding), n tokens, d width.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.measures import residuals
from rank_collapse.measures.norms import as_array, in_own_precision
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.entry import as_batch, as_mask, enter
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import States, run
from rank_collapse.network.precision import full_precision

# name -> measure(x [n, d], mask=[n]) of the tokens of one layer
MEASURES: dict[str, Callable] = {
    "residual_ratio": residuals.residual_ratio,
    "rank_one_ratio": residuals.rank_one_ratio,
    "token_cosine": residuals.token_cosine,
    "effective_rank": residuals.effective_rank,
    "stable_rank": residuals.stable_rank,
}


@full_precision
def profile(
    hidden: Any, *, measures: str | Sequence[str] = ("residual_ratio",), mask: Any = None
) -> dict[str, Float[Array, "l *b"]]:
    """Measures of hidden states by layer, of one example or of a batch, from any framework.

    Args:
        hidden: [l, n, d] or [l, b, n, d]; or a list or tuple of layers [n, d] or [b, n, d], such
            as `hidden_states` of a transformers model.
        measures: One name out of `MEASURES`, or several.
        mask: Bool [n], or [b, n] with a batch: the tokens that exist.

    Returns:
        {measure: [l] or [l, b]}.

    Raises:
        ValueError: An unknown measure, layers of different shapes, or a mask that does not fit.

    Source: Dong et al. 2021, figure 2 for the residual ratio.
    """
    names = named(measures)
    if isinstance(hidden, list | tuple):
        shapes = {tuple(np.shape(h)) for h in hidden}
        if len(shapes) != 1:
            raise ValueError(f"hidden states have different shapes, or there are none: {shapes}")
        return _stacked_profile(hidden[0], hidden, names, mask)
    return _stacked_profile(hidden, None, names, mask)


def named(measures: str | Sequence[str]) -> tuple[str, ...]:
    """One name out of `MEASURES`, or several, as a tuple.

    Raises:
        ValueError: An unknown one.
    """
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    unknown = [m for m in names if m not in MEASURES]
    if unknown:
        raise ValueError(f"measure {unknown[0]!r} is not one of {tuple(MEASURES)}")
    return names


@in_own_precision
def _stacked_profile(first, layers, names, mask):
    """`first` is the array whose precision counts."""
    hidden = as_array(first) if layers is None else jnp.stack([as_array(h) for h in layers])
    if hidden.ndim not in (3, 4):
        raise ValueError(f"hidden states of shape {hidden.shape} are not [l, n, d] or [l, b, n, d]")
    if mask is not None:
        mask = as_mask(as_array(mask))
        if mask.shape not in ((hidden.shape[-2],), hidden.shape[1:-1]):
            raise ValueError(f"mask of shape {mask.shape} does not fit {hidden.shape}")
        mask = jnp.broadcast_to(mask, hidden.shape[1:-1])
    return _profile(hidden, mask, names)


@partial(jax.jit, static_argnames="names")
def _profile(hidden, mask, names):
    def one(x, mask):
        return {name: MEASURES[name](x, mask=mask) for name in names}

    if hidden.ndim == 4:
        one = jax.vmap(one, (0, None if mask is None else 0))
    return jax.vmap(one, (0, None))(hidden, mask)


def residual_profile(
    params: TransformerParams, x: Any, config: TransformerConfig, **inputs: Any
) -> Float[Array, "l"]:
    """‖res(X^l)‖ / ‖X^l‖ in ‖·‖_{1,∞}, l = 0 .. L, of one example.

    Args:
        params, x, config: As in `apply`.
        **inputs: `mask` (Bool [n]: the tokens that exist) and the other arguments of `apply`.
    """
    return network_profile(params, x, config, **inputs)["residual_ratio"]


@full_precision
def network_profile(
    params: TransformerParams,
    x: Any,
    config: TransformerConfig,
    *,
    mask: Any = None,
    measures: tuple[str, ...] = ("residual_ratio",),
    **inputs: Any,
) -> dict[str, Float[Array, "l"]]:
    """`profile` of a network's hidden states on one example.

    Args:
        params, x, config: As in `apply`.
        mask: Bool [n], the tokens that exist; they are the keys too.
        measures: Names out of `MEASURES`.
        **inputs: Other arguments of `apply`.
    """
    params, entry = enter(params, x, config, mask=mask, **inputs)
    return _network_profile(params, entry, config, named(measures))


@partial(jax.jit, static_argnames="names")
def _network_profile(params, entry, config, names):
    return run(ProfilePass(names), params, entry, config)


@dataclasses.dataclass(frozen=True)
class ProfilePass(States):
    """`network_profile` layer by layer.

    Attributes:
        measures: Names out of `MEASURES`.
    """

    measures: tuple[str, ...] = ("residual_ratio",)

    def measure(self, x: Float[Array, "n d"], mask: Any = None) -> dict[str, Float[Array, ""]]:
        """Of one layer's states."""
        return {name: MEASURES[name](x, mask=mask) for name in self.measures}


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
    given, total = as_batch(inputs)
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
