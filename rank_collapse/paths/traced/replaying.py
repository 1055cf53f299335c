"""A traced program whose sublayers take in the stream of another run.

A value has a level: OUTSIDE if it does not come from the stream, REPLACED if it comes from a
replaced state, ITS_OWN if it comes from a state of this run.

The program is computed twice. The first time finds its states, to which each layer's branches are
added. The second time replaces the state before each layer, and each branch that was kept, by the
state and the branch of the other run.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rank_collapse.agree.other_inputs import OtherInputs
from rank_collapse.checks import refuse_if

# Where a value comes from: not from the stream, from a replaced state, from a state of this run.
OUTSIDE, REPLACED, ITS_OWN = range(3)


class Replacement:
    """The states and branches of another run in the place of a program's own.

    Args:
        others: The other run.
        states: {number of a value: its layer}, of the state before each layer.
        places: (layer, name of the branch) of each sum, in the order of the program.
    """

    def __init__(
        self, others: OtherInputs, states: dict[int, int], places: Sequence[tuple[int, str]]
    ):
        self.others, self.states, self.places = others, states, places
        self.replaced: dict[int, Any] = {}  # by layer, the state that was there
        self._roots: list[Any] = []  # of the branches that were added, in their order

    def place_state(self, number: int, array: Any) -> Any | None:
        """Return the other run's state in the place of a value; None if the value is not a state.

        Args:
            number: Number of the value.
            array: The value.
        """
        layer = self.states.get(number)
        if layer is None:
            return None
        self.replaced[layer] = array
        return _convert(self.others.take_state(layer, array.shape), array)

    def place_branches(self, branch: Any) -> tuple[Any, bool]:
        """Return the other run's branches in the place of those that the program adds to a state.

        Args:
            branch: The added value, a `stream.Tagged`, with the outputs of branches that it is the
                sum of (`pending`).

        Returns:
            (the array that is added instead, whether the layer ends with this sum). A branch that
            the other run did not record stays the program's own.

        Raises:
            ValueError: The branch was not computed from a state of the other run.
        """
        refuse_if(
            branch.level != REPLACED,
            f"inputs={self.others.name} cannot replace the states of fn, because a branch reads "
            "another state than the one to which it is added",
        )
        array = branch.array
        parts = sorted(branch.pending, key=lambda part: part.axis)
        indices = [self._find_index(part) for part in parts]
        places = [self.places[index] for index in indices if index < len(self.places)]
        if len(places) < len(indices):
            return array, False  # the program has other sums: `check_complete` says so
        branches = [self.others.take_branch(*place) for place in places]
        layer, last = places[-1][0], max(indices) + 1
        ends = last == len(self.places) or self.places[last][0] != layer
        if any(branch is None for branch in branches):
            return array, ends
        return _convert(sum(branches), array), ends

    def _find_index(self, part):
        """Return which branch of the program this is, counted in the order in which branches are
        added.

        The same branch may be added several times, for several readers: it keeps its number.
        """
        for index, root in enumerate(self._roots):
            if root is part.root:
                return index
        self._roots.append(part.root)
        return len(self._roots) - 1

    def check_complete(self, places: Sequence[tuple[int, str]]) -> None:
        """Check that the second computation had the states and sums of the first.

        Args:
            places: (layer, name of the branch) of its sums.

        Raises:
            ValueError: States or sums differ, for example if a loop or a choice depends on the
                states.
        """
        refuse_if(
            list(places) != list(self.places) or len(self.replaced) < len(self.states),
            f"with the states of inputs={self.others.name}, fn adds other branches than before, "
            "because a loop or a condition depends on the states",
        )


def refuse_own_state(levels: Sequence[int], scope: str) -> None:
    """Raise a ValueError where a branch reads a state of its own run.

    Args:
        levels: Levels of the values that enter an equation of the branch.
        scope: Scope of the branch.
    """
    refuse_if(
        ITS_OWN in levels,
        f"inputs= cannot replace the states of fn, because the branch {scope!r} reads another "
        "state besides the one to which it is added",
    )


def _convert(array, like):
    """Return an array in the shape and dtype of another."""
    return jnp.asarray(np.ascontiguousarray(array)).reshape(like.shape).astype(like.dtype)
