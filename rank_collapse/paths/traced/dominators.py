"""Which values of a program all paths go through.

A value that lies on every way from the input to another value dominates the other value. The
dominators of a value are a chain, so that each node keeps its nearest one alone.
"""

import itertools
from collections.abc import Iterable, Iterator

_numbers = itertools.count()


class Node:
    """A value, or a branch as a whole, on the ways from the input to the output.

    Attributes:
        above: The nearest node that all ways to this one go through; None for the input.
        branch: The branch that the value is made in; None outside of branches.
        options: For a value of a condition, the values of its cases; only one is computed.
        number: Larger than the number of any node above.
    """

    __slots__ = ("above", "branch", "number", "options")

    def __init__(self, above: "Node | None", branch: object = None, options: Iterable["Node"] = ()):
        self.above, self.branch, self.options = above, branch, tuple(options)
        self.renumber()

    def renumber(self) -> None:
        """Give the node the next number, behind all nodes so far."""
        self.number = next(_numbers)


def meet(nodes: Iterable[Node]) -> Node:
    """Return the nearest node that all ways to any of the nodes go through.

    Args:
        nodes: One or more.
    """
    first, *others = nodes
    for other in others:
        while first is not other:
            if first.number < other.number:
                first, other = other, first
            first = first.above
    return first


def dominates(node: Node, other: Node) -> bool:
    """Whether all ways to the other node go through a node.

    Args:
        node, other: The nodes.
    """
    while other.number > node.number:
        other = other.above
    return other is node


def walk_up(node: Node) -> Iterator[Node]:
    """Go through the dominators of a node, and through those inside the cases of conditions.

    Args:
        node: The last node.
    """
    waiting: list[tuple[Node | None, Node | None]] = [(node, None)]
    while waiting:
        current, stop = waiting.pop()
        while current is not None and current is not stop:
            yield current
            waiting += [(option, current.above) for option in current.options]
            current = current.above
