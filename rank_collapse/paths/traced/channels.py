"""Sums of paths by length, computed only where a later sum needs them.

The sums of a value of shape [...] are an array [k, ...] with a slot for each length, or [k, m, ...]
where MLPs are counted too. A value that no path of length k reaches yet has no slot for it: sums of
different numbers of slots are padded where they meet.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from rank_collapse.annotations import AnyArray
from rank_collapse.paths.traced.inner_skips import Trail, join_trails


class LazySums:
    """Sums by length that are computed at their first use.

    Args:
        compute: Function of the arrays of the sources.
        sources: The sums from which these are computed.
        trail: What the paths went through; None where only the sources say it.
    """

    __slots__ = ("_array", "_compute", "_sources", "trail")

    def __init__(
        self,
        compute: Callable[..., AnyArray],
        sources: Sequence["LazySums"] = (),
        trail: Trail | None = None,
    ):
        self._compute, self._sources, self._array = compute, tuple(sources), None
        self.trail = trail or join_trails(s.trail for s in sources)

    @property
    def array(self) -> AnyArray:
        """Compute the sums at the first call, [lengths, ...], and return them.

        The sums of a value are computed from those of its sources. A stack takes the place of
        recursion, because a deep network would exceed Python's limit.
        """
        waiting = [self]
        while waiting:
            node = waiting[-1]
            missing = [s for s in node._sources if s._array is None]
            if node._array is not None or not missing:
                waiting.pop()
                node._finish()
            waiting.extend(missing if node._array is None else ())
        return self._array

    def _finish(self):
        """Compute the sums from those of the sources, and let go of the sources."""
        if self._array is None:
            self._array = self._compute(*(s._array for s in self._sources))
            self._compute, self._sources = None, ()


def _map_in_turn(fn):
    """Return a function that applies fn to each slot of its arguments, one slot after the other."""
    return lambda *sums: jax.lax.map(lambda slot: fn(*slot), sums)


@dataclasses.dataclass(frozen=True)
class Slots:
    """The slot axes in front of all sums: one for each kind of branch that is counted.

    Attributes:
        limits: For each axis the longest length that has its own slot; None for no limit. Longer
            paths share one more slot at the end.
    """

    limits: tuple[int | None, ...]

    @property
    def num_axes(self) -> int:
        """The number of slot axes."""
        return len(self.limits)

    def start(self, direction: AnyArray) -> AnyArray:
        """Return the sums over paths at their start: the direction, as the sum of the paths of
        length 0."""
        return direction[(None,) * self.num_axes]

    def map(self, fn: Callable[..., AnyArray], is_batched: bool = True) -> Callable[..., AnyArray]:
        """Map a function of arrays over the slots of sums, padded to equal numbers.

        Args:
            fn: Function that takes one array for each of the sums and returns one array or several.
            is_batched: False for a function that `jax.vmap` cannot map: one slot after the other.
        """
        mapped = fn
        for _ in range(self.num_axes):
            mapped = jax.vmap(mapped) if is_batched else _map_in_turn(mapped)
        return lambda *sums: mapped(*self.pad_alike(*sums))

    def sizes(self, sums: AnyArray) -> tuple[int, ...]:
        """Return the number of slots (path lengths) on each axis of sums [*slots, ...]."""
        return sums.shape[: self.num_axes]

    def pad_alike(self, *sums: object) -> tuple[AnyArray, ...]:
        """Pad sums with 0 for further path lengths, up to the largest numbers among them."""
        sizes = self.largest(sums)
        return tuple(self.resize(s, sizes) for s in sums)

    def largest(self, sums: Sequence[object]) -> tuple[int, ...]:
        """Return the largest number of slots (path lengths) among several sums, for each axis; 1
        without sums."""
        sizes = [self.sizes(s) for s in sums] or [(1,) * self.num_axes]
        return tuple(map(max, zip(*sizes, strict=True)))

    def resize(self, sums: AnyArray, sizes: Sequence[int]) -> AnyArray:
        """Add empty slots at the end of each axis, or drop slots that are known to be empty.

        Args:
            sums: Sums [*slots, ...], with one slot for each path length.
            sizes: The new number of slots on each axis.
        """
        for axis, size in enumerate(sizes):
            missing = size - sums.shape[axis]
            if missing < 0:
                sums = jax.lax.slice_in_dim(sums, 0, size, axis=axis)
            elif missing:
                pads = [(0, missing if i == axis else 0) for i in range(sums.ndim)]
                sums = jnp.pad(sums, pads)
        return sums

    def shift(self, sums: AnyArray, axis: int) -> AnyArray:
        """Move sums to paths of one length more, as when they leave a branch.

        Args:
            sums: Sums [*slots, ...], with one slot for each path length.
            axis: The axis of the kind of branch.

        Returns:
            Sums with one slot more. If there is a limit, its last slot adds up all longer paths.
        """
        limit, size = self.limits[axis], sums.shape[axis]
        pads = [(int(i == axis), 0) for i in range(sums.ndim)]
        moved = jnp.pad(sums, pads)
        if limit is None or size < limit + 2:
            return moved
        last = jax.lax.slice_in_dim(moved, size, size + 1, axis=axis)
        moved = jax.lax.slice_in_dim(moved, 0, size, axis=axis)
        index = [slice(None)] * moved.ndim
        index[axis] = slice(size - 1, size)
        return moved.at[tuple(index)].add(last)

    def cap(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return numbers of slots (path lengths), no larger than the limits with one slot for all
        longer paths."""
        return tuple(
            size if limit is None else min(size, limit + 2)
            for size, limit in zip(sizes, self.limits, strict=True)
        )
