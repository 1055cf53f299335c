"""The description of a tensor in a measured pass: the maps behind it, its stream, its masks.

Axis letters: n queries, m keys, d width.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

PAIR = 2**32  # a pair of query i and key j has the number i · PAIR + j


@dataclasses.dataclass(eq=False)
class Source:
    """A tensor as linear maps read it: a matrix.

    Attributes:
        tag: Tag of the tensor.
        order: Order of the tensor's axes, with the axes of rows first.
        count: How many rows there are.
        matrix: [count, d]; None after the layer that read it.
    """

    tag: "Tag"
    order: list[int]
    count: int
    matrix: Tensor | None = None

    def read_entries(self) -> Tensor | None:
        """Reads which map outputs the first and the last entry of each row were copied from, by
        number.

        Returns:
            Int [count, 2]; None if the numbers are unknown.
        """
        if "entries" not in self.tag.followers or not self.tag.maps:
            return None
        numbers = self.tag.followers["entries"]().permute(self.order).reshape(self.count, -1)
        return numbers[:, [0, -1]]


@dataclasses.dataclass(eq=False)
class Map:
    """A linear map that ran.

    Attributes:
        source: Input of the map.
        parameters: ((parameter, axis of its outputs or −1, its first output), ...); None for a part
            of a parameter.
        frames: Numbers of the modules that were running.
        start, count: Number of its first entry, and number of entries, row by row.
        width: Number of entries in one row.
        has_rows: Whether it has the same rows as its source.
    """

    source: Source
    parameters: tuple[tuple[Tensor | None, int, int], ...]
    frames: tuple[int, ...]
    start: int
    count: int
    width: int
    has_rows: bool

    def find_rows(self, entries: Tensor) -> Tensor:
        """Finds the row of the source (the token) from which each output of the map was computed.

        Args:
            entries: Numbers of outputs, of any map.

        Returns:
            Int of the same shape; −1 for outputs of other maps.
        """
        is_inside = (entries >= self.start) & (entries < self.start + self.count) & self.has_rows
        return torch.where(is_inside, (entries - self.start) // self.width, -1)


@dataclasses.dataclass(eq=False)
class Term:
    """A product of queries and keys, if a product with values uses it.

    Attributes:
        letters: Letters of the axes of queries, keys and their product.
        sizes: Sizes of the letters.
        query, key: Tags of both.
    """

    letters: tuple[str, str, str]
    sizes: dict[str, int]
    query: "Tag"
    key: "Tag"


@dataclasses.dataclass(eq=False)
class Tag:
    """What is said of one tensor.

    Attributes:
        maps: The maps that made it, without earlier maps and without the maps of gates.
        behind: The inputs of all maps behind it, and its roots, which no map made.
        past: Names of the attentions from which it comes, in the order in which they ran.
        stream: The roots of the whole pass whose rows correspond to its rows; an attention's result
            has the rows of its queries.
        is_constant: Whether it comes from parameters, buffers and numbers alone.
        parameters: If it is constant, the parameters from which it comes.
        joined: The constants that were concatenated to make it, in order.
        is_gate: Whether it is a bounded factor that multiplies other values.
        is_content: Whether a map made it, or the result of a map decided it.
        terms: The products of queries and keys from whose sum it comes.
        is_softmax: Whether a softmax came after them.
        is_exponential: Whether it contains an exponential, as in a softmax that is computed by
            hand.
        is_chosen: Whether content decided which of its scores are hidden.
        is_unread: Whether its scores met a possible mask in an unknown way.
        followers: {name: a function that returns a tensor of the same shape}: numbers of "entries"
            (−1 for entries of no map), and of further summands, "entries 2"; "pairs" of query and
            key; "allowed", Bool, the keys that masks leave to a query; "softmax".
        source: The tensor itself, if a map read it.
    """

    maps: frozenset[Map] = frozenset()
    behind: frozenset[object] = frozenset()
    past: tuple[str, ...] = ()
    stream: frozenset[object] = frozenset()
    is_constant: bool = False
    parameters: tuple[Tensor, ...] = ()
    joined: tuple[Tensor, ...] = ()
    is_gate: bool = False
    is_content: bool = False
    terms: tuple[Term, ...] = ()
    is_softmax: bool = False
    is_exponential: bool = False
    is_chosen: bool = False
    is_unread: bool = False
    followers: dict[str, Callable[[], Tensor]] = dataclasses.field(default_factory=dict)
    source: Source | None = None

    def list_maps(self) -> list[Map]:
        """Lists the maps that made it, in order."""
        return sorted(self.maps, key=lambda linear_map: linear_map.start)


def join_pasts(tags: Iterable[Tag]) -> tuple[str, ...]:
    """Lists the names of the attentions that tensors come from."""
    return tuple(dict.fromkeys(name for tag in tags for name in tag.past))


def join_streams(tags: Iterable[Tag]) -> frozenset[object]:
    """Joins the streams of tensors that have the same rows."""
    return frozenset().union(*(tag.stream for tag in tags))
