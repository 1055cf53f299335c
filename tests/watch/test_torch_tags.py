"""Tags of tensors: maps in order, rows of a source by the numbers of entries, pasts, streams."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch.torch_tags import (  # noqa: E402
    Map,
    Source,
    Tag,
    join_pasts,
    join_streams,
)


def make_map(start, *, width=2, count=6, has_rows=True):
    """Makes a map with entries start .. start + count − 1, `width` of them in a row."""
    return Map(Source(Tag(), [0, 1], 3), (), (), start, count, width, has_rows)


def test_entries_have_the_row_of_their_map_and_others_none():
    entries = torch.tensor([9, 10, 11, 12, 15, 16])
    assert make_map(10).find_rows(entries).tolist() == [-1, 0, 0, 1, 2, -1]
    assert make_map(10, has_rows=False).find_rows(entries).tolist() == [-1] * 6


def test_maps_are_in_the_order_of_their_entries():
    first, second = make_map(4), make_map(40)
    assert Tag(maps=frozenset({second, first})).list_maps() == [first, second]


def test_a_source_reads_the_first_and_the_last_entry_of_each_row():
    numbers = torch.arange(12).reshape(3, 4)
    tag = Tag(maps=frozenset({make_map(0)}), followers={"entries": lambda: numbers})
    assert Source(tag, [1, 0], 4).read_entries().tolist() == [[i, 8 + i] for i in range(4)]
    assert Source(Tag(), [0, 1], 3).read_entries() is None
    assert Source(Tag(followers=tag.followers), [1, 0], 4).read_entries() is None  # of no map


def test_tensors_that_are_joined_have_each_attention_once_and_all_streams():
    tags = [
        Tag(past=("a", "b"), stream=frozenset({1})),
        Tag(past=("b", "c"), stream=frozenset({2})),
    ]
    assert join_pasts(tags) == ("a", "b", "c")
    assert join_streams(tags) == {1, 2} and join_streams([]) == frozenset()
