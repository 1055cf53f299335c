"""Branches that contain their own skip connection, found in the recorded values."""

from collections.abc import Sequence

from rank_collapse.torch.exporting import describe_place, module_calls
from rank_collapse.torch.operators import MOVES, NORMS
from rank_collapse.torch.sums import sort_sources
from rank_collapse.torch.values import Value

_ADDITIONS = ("add", "sub", "rsub")
# Every entry of the result stays at the place of an entry of the argument, or of its token.
_IN_PLACE = {*_ADDITIONS, *MOVES, *NORMS, "mul", "div", "neg"}


def check_skips(output: Value, axes: Sequence[str]) -> None:
    """Check that no branch adds its input to its output, where no path goes past any branch.

    Such a branch, a whole layer or an attention module that adds the residual itself, would be on
    every path. Networks without skips have no such addition.

    Args:
        output: Output of degree 1.
        axes: The names of the axes of path lengths.

    Raises:
        ValueError: A branch contains its skip; the message names a module inside of it.
    """
    order = sort_sources(output)
    for axis, name in enumerate(axes):
        if not _all_of_one_length(order, axis):
            continue
        leaving = (value.sources[0] for value in order if value.axis == axis)
        for value in leaving:
            addition = _find_addition(value)
            if addition is not None:
                _refuse_skip(name, value, *addition)


def _all_of_one_length(order, axis):
    """Return whether all paths go through equally many branches, and through at least one.

    Args:
        order: The values that the output depends on, each after its sources.
        axis: The axis of path lengths that counts these branches, such as attentions.
    """
    fewest: dict[int, int] = {}
    most: dict[int, int] = {}
    for value in order:
        step = int(value.axis == axis)
        sources = [id(source) for source in value.sources]
        fewest[id(value)] = step + min((fewest[s] for s in sources), default=0)
        most[id(value)] = step + max((most[s] for s in sources), default=0)
    last = id(order[-1])
    return fewest[last] == most[last] > 0


def _find_addition(output):
    """Return the sum that adds a branch's input, and the other summand; None where there is none.

    Args:
        output: What leaves the branch.
    """
    waiting: list[tuple[Value, tuple[Value, Value] | None]] = [(output, None)]
    while waiting:
        value, addition = waiting.pop()
        if value.branch != output.branch:
            if addition is not None:
                return addition
            continue
        if value.operator not in _IN_PLACE:
            continue
        for source in value.sources:
            others = [v for v in value.sources if v is not source and v.branch == output.branch]
            is_sum = value.operator in _ADDITIONS and others
            waiting.append((source, (value, others[0]) if is_sum else addition))
    return None


def _refuse_skip(axis, output, addition, branch):
    """Refuse a branch that contains its skip.

    Args:
        axis: The name of its axis.
        output: What leaves it.
        addition: The sum.
        branch: What is added to the branch's input.
    """
    label = f"branches[{axis!r}]" if axis else "branches"
    place = describe_place(addition.node)
    path = dict(module_calls(output.node))[output.branch.call]
    while branch.operator in MOVES and branch.sources[0].branch == output.branch:
        branch = branch.sources[0]
    inside = [p for _, p in module_calls(branch.node)]
    cure = f", such as {inside[-1]!r}" if inside and inside[-1] != path else ""
    raise ValueError(
        f"{label}: {path!r} contains its own skip in {place}, so every path would go "
        f"through it; match only what is added to the skip{cure}"
    )
