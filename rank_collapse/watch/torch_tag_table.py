"""The tags of a pass: one for each tensor, and which of them are constant or depend on content."""

from collections.abc import Iterable, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rank_collapse.watch.torch_masks import (
    SIDES,
)
from rank_collapse.watch.torch_tags import Tag, Term, join_pasts, join_streams


class TagTable:
    """The tags of one pass.

    Args:
        frames: Frames of the modules that run, each with its `number`.
        buffers: Buffers of the model, which are constant.

    Attributes:
        tags: {tensor: tag}.
        recent: The tags of the layer that runs.
        num_entries: Number of map entries that have a number.
        sums: {tensor: term} of means by a softmax over tokens.
    """

    def __init__(self, frames: Sequence[object], buffers: Iterable[Tensor] = ()):
        self.frames = frames
        self.tags: MutableMapping[Tensor, Tag] = WeakIdKeyDictionary()
        self.recent: list[Tag] = []
        self.num_entries = 0
        self._results: set[object] = set()  # roots that attentions gave
        self.sums: MutableMapping[Tensor, Term] = WeakIdKeyDictionary()
        for buffer in buffers:
            self.tags[buffer] = Tag(is_constant=True)

    def tag(self, tensor: Tensor) -> Tag:
        """Returns the tag of a tensor, the record of its origin, and makes one if it has none.

        A parameter's new tag names the parameter. Any other tensor without a tag counts as one that
        no linear map made (a root), such as the embedded tokens.
        """
        if tensor not in self.tags:
            if isinstance(tensor, nn.Parameter):
                self.record(tensor, Tag(is_constant=True, parameters=(tensor,)))
            else:
                self.begin(tensor)
        return self.tags[tensor]

    def record(self, tensor: Tensor, tag: Tag) -> None:
        """Gives a tensor the record of its origin, as one of the layer that runs."""
        self.tags[tensor] = tag
        self.recent.append(tag)

    def begin(self, tensor: Tensor, tags: Iterable[Tag] = (), past: tuple[str, ...] = ()) -> None:
        """Marks a tensor as one that no map made, such as the result of an attention.

        Args:
            tensor: The tensor.
            tags: Tags of tensors that have its rows.
            past: Names of the attentions before the tags.
        """
        tags, root = list(tags), object()
        stream = join_streams(tags) or frozenset([root])
        if past:
            self._results.add(root)
        is_content = bool(past) or any(tag.is_content for tag in tags)
        past = tuple(dict.fromkeys(past + join_pasts(tags)))
        self.record(
            tensor, Tag(frozenset(), frozenset([root]), past, stream, is_content=is_content)
        )

    def has(self, tensor: Tensor) -> bool:
        """Returns whether the origin of a tensor is recorded."""
        return tensor in self.tags

    def comes_from_attention(self, tensor: Tensor) -> bool:
        """Returns whether a tensor comes from the result of an attention, or from no linear map at
        all."""
        tag = self.tag(tensor)
        return not tag.maps or not self._results.isdisjoint(tag.behind)

    def is_content(self, tensor: Tensor) -> bool:
        """Returns whether a map made a tensor, or the result of a map decided it."""
        return self.has(tensor) and self.tags[tensor].is_content

    def is_constant(self, tensor: Tensor) -> bool:
        """Returns whether a tensor comes from parameters, buffers and numbers alone."""
        is_parameter = isinstance(tensor, nn.Parameter)
        return is_parameter or (self.has(tensor) and self.tags[tensor].is_constant)

    def forget_layer(self) -> None:
        """Drops the inputs of a layer's maps, its masks and its numbers; a checkpointed layer holds
        none either.

        The numbers are computed again if a later layer uses the same keys.
        """
        for tag in self.recent:
            for name in (*SIDES, "softmax"):
                tag.followers.pop(name, None)
            for follower in tag.followers.values():
                follower.cache_clear()
            if tag.source is not None:
                tag.source.matrix = None
        self.recent.clear()

    def number(self, tensor: Tensor, name: str, tag: Tag | None = None) -> Tensor:
        """Returns the numbers that follow a tensor, Int of its shape; −1 where there are none.

        Args:
            tensor: The tensor.
            name: Which numbers: "entries" (of map outputs that it was copied from) or "pairs" (of
                query and key).
            tag: The tag that has them; None for the tensor's present tag.
        """
        follower = (tag or self.tags[tensor]).followers.get(name)
        return -torch.ones_like(tensor, dtype=torch.long) if follower is None else follower()
