"""How a state inside a network changes the last state: the Jacobian J_l, exact and by path length.

    fn = rc.paths.name_states(params, config)  # or any function with names
    moved = rc.paths.transport(fn, ids, direction, layer=4, branches="attention")
    moved.by_length  # [longest + 1, d]: J_l · direction, split by the attentions passed

J_l is the mean Jacobian of the Jacobian lens: the derivative of the last state at all positions
with respect to the state after layer l at one position, summed over the later positions and
averaged over the sources. The first 16 positions are left out, because their states are those of
attention sinks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from rank_collapse import checks
from rank_collapse.annotations import AnyArray, ArrayLike, Leaf, Tree
from rank_collapse.measures.residuals import effective_rank
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.network.precision import full_precision
from rank_collapse.network.transformer import apply
from rank_collapse.paths.functions import sum_paths
from rank_collapse.paths.traced.interpreter import Start

UNITS = 64  # directions at once: bounds the memory of a Jacobian


class Transport(NamedTuple):
    """What `transport` measured.

    Attributes:
        by_length: [k, d], mean over sources of the sum over positions, by path length.
        by_position: [k, n, d], the change at each position from all sources together.
        total: [d], the sum over all lengths, including those beyond the longest: J_l · direction.
        longer: [n, d], the change at each position by paths beyond the longest; None if there are
            none.
    """

    by_length: Float[Array, "k d"]
    by_position: Float[Array, "k n d"]
    total: Array
    longer: Leaf | None = None

    @property
    def arriving(self) -> AnyArray:
        """Sum what arrives at each position over all lengths, [n, d]."""
        total = self.by_position.sum(0)
        return total if self.longer is None else total + self.longer


def name_states(
    params: TransformerParams, config: TransformerConfig, **inputs: ArrayLike | None
) -> Callable[[Tree], Tree]:
    """Return one of our networks as a function x → last state, with the names that `transport`
    looks for.

    The names, by `jax.ad_checkpoint.checkpoint_name`, are "attention", "cross" and "mlp" of the
    branches, and "residual" of the state after each layer.

    Args:
        params, config: The network, as `rc.pretrained.load` returns them.
        **inputs: See `rc.apply`, but `edit`.
    """
    places = {f"{kind}_branch": kind for kind in config.kinds} | {"residual": "residual"}
    edit = {
        place: lambda value, layer, name=name: checkpoint_name(value, name)
        for place, name in places.items()
    }
    return lambda x: apply(params, x, config, edit=edit, **inputs).hidden[-1]


@full_precision
def transport(
    fn: Callable[[Tree], Tree],
    x: ArrayLike,
    direction: ArrayLike,
    *,
    layer: int,
    branches: str | Mapping[str, str],
    states: str = "residual",
    sources: int | Sequence[int] | None = None,
    first_position: int = 16,
    longest: int | None = None,
    freeze: bool = False,
) -> Transport:
    """Compute J_l · direction from the state after layer l to the last state, by path length.

    Exact by default: Σ_k by_length is the derivative. With freeze=True it is the frozen part, the
    path sums of Dong et al. 2021, which is a different vector.

    Args:
        fn: Function that takes x and returns the last state [n, d]; each layer's state has a
            `checkpoint_name`.
        x: Input of the function, such as token ids.
        direction: [d], or [n, d] to use it as it is, without sources.
        layer: Index of the state among those of the name, from 0.
        branches, longest, freeze: See `function_contributions`, of one kind of branch.
        states: The name of the states: a regular expression.
        sources: Positions to which the direction is added, one at a time; the result is the mean
            over them. None for all positions from `first_position` on.
        first_position: First position whose output counts; outputs before it are left out, also
            with `sources`.

    Returns:
        `Transport`.

    Raises:
        ValueError: No such layer, a direction of another width, no positions left, and as
            `function_contributions`.

    Source: the mean over sources of the Jacobian lens, its cotangent on all later positions.
    """
    if isinstance(branches, Mapping):
        raise ValueError(
            f"branches={branches!r} is a dict, but transport counts one kind of branch; pass its "
            "pattern as a string"
        )
    layer = checks.check_whole("layer", layer, 0)
    first_position = checks.check_whole("first_position", first_position, 0)
    direction = jnp.asarray(direction)
    num_sources = []

    def place(state):
        moved, count = _place(direction.astype(state.dtype), state, sources, first_position)
        num_sources.append(count)
        return moved

    start = Start(states, layer, place)
    contributions = sum_paths(fn, jnp.asarray(x), branches, longest, freeze, start=start)
    by_position = contributions.by_length
    if by_position.ndim != 3:
        raise ValueError(
            f"fn returns the shape {list(by_position.shape[1:])}, but must return states [n, d]"
        )
    counted = jnp.arange(by_position.shape[1]) >= first_position
    by_length = jnp.sum(by_position * counted[None, :, None], axis=1) / num_sources[0]
    total = by_length.sum(0)
    if contributions.longer is not None:
        total = total + jnp.sum(contributions.longer * counted[:, None], axis=0) / num_sources[0]
    return Transport(by_length, by_position, total, contributions.longer)


def _place(direction, state, sources, first_position):
    """Return the direction at its sources.

    Args:
        direction: One direction [d] for all sources, or the direction of each position [n, d].
        state: The state [n, d].
        sources: Positions that the direction starts from; None for all from `first_position` on.
        first_position: First position whose output counts.

    Returns:
        (direction [n, d], number of sources). A direction [d] stands at every source, with 0 at
        the other positions. A direction [n, d] stays as it is, and counts as one source.

    Raises:
        ValueError: A direction of another shape, or no positions.
    """
    if state.ndim != 2:
        raise ValueError(
            f"fn has states of the shape {list(state.shape)}, but transport needs [n, d]"
        )
    if direction.shape not in (state.shape, state.shape[1:]):
        raise ValueError(
            f"direction has the shape {list(direction.shape)}, but must have the shape "
            f"{list(state.shape[1:])} or {list(state.shape)}"
        )
    n = state.shape[0]
    if first_position >= n:
        raise ValueError(
            f"first_position={first_position} leaves out all {n} positions, but must be below {n}"
        )
    if direction.ndim == 2:
        return direction, 1
    sources = np.arange(first_position, n) if sources is None else np.asarray(sources)
    sources = np.atleast_1d(sources)
    if (
        not sources.size
        or sources.dtype.kind not in "iu"
        or sources.min() < 0
        or sources.max() >= n
    ):
        raise ValueError(f"sources={sources.tolist()} must be positions from 0 to {n - 1}")
    return jnp.zeros_like(state).at[sources].add(direction), sources.size


@full_precision
def transport_ranks(
    fn: Callable[[Tree], Tree],
    x: ArrayLike,
    *,
    layer: int,
    source: int,
    branches: str,
    states: str = "residual",
    longest: int | None = None,
    freeze: bool = False,
    distances: Sequence[int] | None = None,
) -> Float[Array, "k m"]:
    """Compute the effective rank of ∂(last state at s + m)/∂(state of layer l at s), by distance m.

    It runs the derivative along all d unit vectors of the source's state, `UNITS` at a time.

    Args:
        fn, x, layer, branches, states, longest, freeze: See `transport`; longest=0 is the cheapest
            if only the rank of all lengths together is needed.
        source: s.
        distances: m; None for all from 0 to the last position.

    Returns:
        [longest + 2, distances]: for the part of each length, and last for all lengths together.

    Raises:
        ValueError: In the same cases as `transport`; distances beyond the last position.
    """
    shape = jax.eval_shape(fn, jnp.asarray(x))
    n, d = shape.shape
    source = checks.check_whole("source", source, 0, n - 1)
    distances = np.arange(n - source) if distances is None else np.asarray(distances)
    if distances.min() < 0 or source + distances.max() >= n:
        raise ValueError(
            f"distances={distances.tolist()} must be from 0 to {n - 1 - source}, because "
            f"source={source} is one of {n} positions"
        )

    def run(unit):
        """Compute the derivative along one unit vector of the source's state, [k + 1, m, d]: by
        path length, and of all lengths together."""
        moved = transport(
            fn,
            x,
            unit,
            layer=layer,
            branches=branches,
            states=states,
            sources=source,
            first_position=0,
            longest=longest,
            freeze=freeze,
        )
        reached = source + distances
        return jnp.concatenate([moved.by_position[:, reached], moved.arriving[None, reached]])

    units = jnp.eye(d, dtype=shape.dtype)
    jacobians = jax.lax.map(run, units, batch_size=UNITS)  # [d, k + 1, m, d]
    return effective_rank(jnp.moveaxis(jacobians, 0, 2))
