"""The tags of a pass: roots, what content decides, numbers, and what a layer's end drops."""

import functools

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch.torch_tag_table import TagTable  # noqa: E402
from rank_collapse.watch.torch_tags import Source, Tag  # noqa: E402


def test_a_tensor_of_several_has_their_streams_and_is_content_if_any_is():
    table, tensors = TagTable([]), [torch.ones(2) for _ in range(4)]
    first = Tag(stream=frozenset({1}), past=("a",))
    second = Tag(stream=frozenset({2}), is_content=True)
    for tags, expected in (([first, second], {1, 2}), ([second, first], {1, 2}), ([first], {1})):
        table.begin(tensors[0], tags)
        tag = table.tag(tensors[0])
        assert tag.stream == expected and tag.past == ("a",)
        assert tag.is_content == (len(tags) > 1) == table.is_content(tensors[0])
    table.begin(tensors[1], (tag for tag in (first,)), ("b", "a"))
    tag = table.tag(tensors[1])
    assert tag.past == ("b", "a") and tag.is_content and table.comes_from_attention(tensors[1])
    assert table.tag(tensors[2]).stream == table.tag(tensors[2]).behind != tag.behind
    assert not table.is_content(tensors[3]) and not table.has(tensors[3])


def test_numbers_are_of_a_tag_or_none():
    table, tensor, numbers = TagTable([]), torch.ones(2, 3), torch.arange(6).reshape(2, 3)
    table.record(tensor, Tag(followers={"entries": lambda: numbers}))
    assert table.number(tensor, "entries") is numbers
    nothing = table.number(tensor, "pairs")
    assert nothing.dtype == torch.long and (nothing == -1).all() and nothing.shape == (2, 3)
    assert (table.number(tensor, "entries", Tag()) == -1).all()


def test_a_layer_that_ends_drops_its_inputs_and_masks():
    table, tensor = TagTable([], [buffer := torch.ones(2)]), torch.ones(3)
    assert table.is_constant(buffer) and table.is_constant(torch.nn.Parameter(buffer))
    names = ("allowed", "left out", "softmax")
    tag = Tag(followers=dict.fromkeys(names, lambda: tensor))
    tag.source = Source(tag, [0], 3, tensor)
    table.record(tensor, tag)
    table.forget_layer()
    assert tag.followers == {} and tag.source.matrix is None and table.recent == []


def test_a_layer_that_ends_holds_no_numbers_and_they_are_computed_again():
    """As for keys that a later layer uses again."""
    table, calls = TagTable([]), []
    follower = functools.cache(lambda: calls.append(0) or torch.zeros(2))
    for _ in range(2):
        tag = Tag(followers={"entries": follower, "allowed": follower})
        table.record(torch.ones(2), tag)
        follower()
        follower()
        table.forget_layer()
    assert tag.followers == {"entries": follower} and len(calls) == 2
    assert follower.cache_info().currsize == 0
