"""Measurements layer by layer, of one example and of a batch of padded texts.

Axis letters: b examples, l layers (0 is the embedding), n tokens, d width.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rank_collapse.measures.norms import (
    as_array,
    as_bools,
    as_floats,
    as_jax,
    in_own_precision,
    namespace,
    together,
)
from rank_collapse.measures.table import MEASURES, named
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.inputs import as_batch, prepare_inputs
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.passes import States, run
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import Trace


@in_own_precision
@full_precision
def profile(
    hidden: Any,
    *,
    measures: str | Sequence[str] = ("residual_ratio",),
    mask: Any = None,
    batch_axis: int | None = None,
) -> dict[str, Float[Array, "l *b"]]:
    """Measures of hidden states by layer, of one example or of a batch, from any framework.

    Args:
        hidden: A `Trace`, of one example or a batch; an array [l, n, d]; a list or tuple of layers
            [n, d] or [b, n, d], such as `hidden_states` of a transformers model; or an array of
            four axes, with `batch_axis`.
        measures: One name out of `MEASURES`, or several, of those that are of tokens.
        mask: Bool [n], or [b, n] with a batch: the tokens that exist.
        batch_axis: Of an array of four axes: 1 for [l, b, n, d], 0 for [b, l, n, d].

    Returns:
        {measure: [l] or [l, b]}; NaN where tokens are not finite, or where none exists.

    Raises:
        ValueError: An unknown measure, layers of different shapes, a batch whose axis is not
            known, or a mask that does not fit.

    Source: Dong et al. 2021, figure 2 for the residual ratio.
    """
    names = named(measures)
    hidden = _layers_first(hidden, batch_axis)
    if mask is not None:
        mask = as_bools(mask)
        if mask.shape not in ((hidden.shape[-2],), hidden.shape[1:-1]):
            raise ValueError(
                f"mask of shape {mask.shape} does not fit {hidden.shape}, [l, n, d] or [l, b, n, d]"
            )
        hidden, mask = together(hidden, mask)
        mask = namespace(mask).broadcast_to(mask, hidden.shape[1:-1])
    if namespace(hidden) is jnp:
        return _profile(hidden, mask, names)
    found = {name: np.empty(hidden.shape[:-2], hidden.dtype) for name in names}
    for at in np.ndindex(hidden.shape[:-2]):
        for name, value in of_known(names, hidden[at], None if mask is None else mask[at[1:]]):
            found[name][at] = value
    return {name: as_jax(values) for name, values in found.items()}


def _layers_first(hidden, batch_axis):
    """Hidden states of any kind as [l, n, d] or [l, b, n, d]; see `profile`."""
    if isinstance(hidden, Trace):
        hidden, batch_axis = (
            hidden.hidden,
            1 - hidden.layer_axis if hidden.hidden.ndim == 4 else None,
        )
    elif isinstance(hidden, Mapping):
        raise ValueError(
            f"hidden states are a {type(hidden).__name__} with {', '.join(map(str, hidden))}: give "
            "the array or list of them that is meant, such as output.hidden_states"
        )
    elif isinstance(hidden, list | tuple):
        layers = [as_array(h) for h in hidden]
        shapes = {h.shape for h in layers}
        if len(shapes) != 1:
            raise ValueError(f"hidden states have different shapes, or there are none: {shapes}")
        hidden = namespace(*layers).stack(layers)
        batch_axis = 1 if batch_axis is None and hidden.ndim == 4 else batch_axis
    hidden = as_floats(hidden)
    if hidden.ndim not in (3, 4):
        raise ValueError(f"hidden states of shape {hidden.shape} are not [l, n, d] or [l, b, n, d]")
    if batch_axis not in ((None,) if hidden.ndim == 3 else (0, 1)):
        raise ValueError(
            f"batch_axis={batch_axis} of hidden states of shape {hidden.shape}: 1 for "
            "[l, b, n, d], 0 for [b, l, n, d] as jax.vmap gives it, None for [l, n, d]"
        )
    return hidden.swapaxes(0, 1) if batch_axis == 0 else hidden


def of_known(
    names: Sequence[str], x: np.ndarray, mask: np.ndarray | None
) -> Iterator[tuple[str, Any]]:
    """(name, measure) of tokens [n, d] in NumPy; NaN where they are not finite."""
    finite = np.isfinite(x if mask is None else x[mask]).all()
    for name in names:
        yield name, MEASURES[name](x, mask=mask) if finite else np.nan


@partial(jax.jit, static_argnames="names")
def _profile(hidden, mask, names):
    def one(x, mask):
        return {name: MEASURES[name](x, mask=mask) for name in names}

    if hidden.ndim == 4:
        one = jax.vmap(one, (0, None if mask is None else 0))
    return jax.vmap(one, (0, None))(hidden, mask)


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
    params, prepared = prepare_inputs(params, x, config, mask=mask, **inputs)
    return _network_profile(params, prepared, config, named(measures))


@partial(jax.jit, static_argnames="names")
def _network_profile(params, prepared, config, names):
    return run(ProfilePass(names), params, prepared, config)


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
