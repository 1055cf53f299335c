"""The sums of a traced program's stream, grouped by layer."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from rank_collapse.checks import refuse_if
from rank_collapse.paths.traced.stream import Sum


class LayerArrays(NamedTuple):
    """The stream and the branches of all layers.

    Attributes:
        residual: The state before each layer, and the one after the last.
        branches: {axis: L arrays} of the kinds that all layers have.
        numbers: Numbers of the L states before the layers, see `stream.Tagged`.
        places: (layer, axis) of each sum, in the order of the program.
        is_output: Whether the last state is the program's output, not a sum.
    """

    residual: list[Any]
    branches: dict[int, list[Any]]
    numbers: list[int | None]
    places: list[tuple[int, int]]
    is_output: bool = False


def group_layers(sums: Sequence[Sum], output: Any, is_output: bool | None = None) -> LayerArrays:
    """Group the branches of a program by layer: an attention, then an MLP where there is one.

    Args:
        sums: Each addition of a branch to the residual stream, in the order of the program: the
            states before and after it, the branch, and the branch's kind (axis 0 for attention, 1
            for an MLP).
        output: Output of the program.
        is_output: Whether the state after the last layer is the output itself. None decides: it is,
            if a norm or another operation follows the last sum of each layer, so that a sum is not
            the state which the next layer reads.

    Raises:
        ValueError: There are no sums, they are not of one stream, layers have other kinds of
            branches than the first, or the last state is not known.
    """
    refuse_if(
        not sums,
        "branches: no branch is added to a state of its shape; the scope of a branch must not "
        "contain its skip",
    )
    layers, places = _split_layers(sums)
    kinds = {e.axis for e in layers[0]}
    for index, layer in enumerate(layers):
        refuse_if(
            {e.axis for e in layer} != kinds,
            f"branches: layer {index} does not have the same kinds of branches as layer 0",
        )
    last = layers[-1][-1].after
    if is_output is None:
        is_output = any(_differ(a[-1].after, b[0].before) for a, b in itertools.pairwise(layers))
    refuse_if(
        is_output and output.shape != last.shape,
        "branches: fn computes more after the last branch of each layer, such as a norm or an MLP; "
        "match the MLP as well, or let fn return the state after the last layer",
    )
    residual = [*(layer[0].before for layer in layers), output if is_output else last]
    branches: dict[int, list[Any]] = {kind: [] for kind in kinds}
    for layer in layers:
        for entry in layer:
            branches[entry.axis].append(entry.branch)
    numbers = [layer[0].number for layer in layers]
    return LayerArrays(residual, branches, numbers, places, is_output)


def _split_layers(sums):
    """Return the sums of each layer, and (layer, axis) of each sum.

    A layer begins with each attention, and with an MLP that follows an MLP.
    """
    layers: list[list[Sum]] = []
    places = []
    shape = sums[0].before.shape
    for entry in sums:
        refuse_if(
            entry.before.shape != shape,
            f"branches: fn adds branches to states of the shapes {list(shape)} and "
            f"{list(entry.before.shape)}, but the states of one network must have one shape",
        )
        kinds_so_far = {e.axis for e in layers[-1]} if layers else set()
        is_attention = entry.axis == 0
        if not layers or is_attention or entry.axis in kinds_so_far:
            layers.append([])
        layers[-1].append(entry)
        places.append((len(layers) - 1, entry.axis))
    return layers, places


def _differ(first, second):
    """Return whether two states have different numbers in any entry."""
    return first is not second and not bool((first == second).all())
