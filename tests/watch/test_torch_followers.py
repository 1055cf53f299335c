"""Followers: numbers of entries and masks, moved, joined and read."""

import pytest

pytest.importorskip("torch")

from rank_collapse.watch import torch_followers
from rank_collapse.watch.torch_tags import PAIR, Map, Source, Tag, Term
from tests.oracles.torch_models import torch


def test_row_numbers_pass_complex_views_exactly():
    """The numbers are beyond 2^24, where float32 has only even ones."""
    numbers = torch.tensor([2**24 + 1, 2**24 + 3])
    for function in (torch.view_as_complex, torch.view_as_real):
        numbers = torch_followers.move_followers(function, ((numbers,), {}), 0)
    assert numbers.tolist() == [2**24 + 1, 2**24 + 3]


def make_map(start, rows, width, has_rows=True):
    """Makes a map with entries from `start` on, `width` of them in each of so many rows."""
    source = Source(Tag(), [0, 1], rows)
    return Map(source, (), (), start, rows * width, width, has_rows)


def follow(**numbers):
    return {name: (lambda a=a: torch.tensor(a)) for name, a in numbers.items()}


def test_masks_intersect_in_the_shape_of_scores():
    first, second = torch.tensor([[True, True], [False, True]]), torch.tensor([1, 0])
    alone = torch_followers.intersect_masks(None, lambda: second, (2, 2))
    assert alone.tolist() == [[True, False]] * 2
    both = torch_followers.intersect_masks(lambda: first, lambda: second, (2, 2))
    assert both.tolist() == [[True, False], [False, False]]


def test_a_tag_of_several_has_their_maps_pasts_and_streams():
    maps = [make_map(0, 2, 2), make_map(4, 2, 2)]
    tags = [
        Tag(frozenset(maps[:1]), frozenset({1}), ("a", "b"), frozenset({5}), is_content=True),
        Tag(frozenset(maps[1:]), frozenset({2}), ("b", "c"), frozenset({6}), is_softmax=True),
    ]
    joined = torch_followers.join_tags(tags)
    assert joined.maps == set(maps) and joined.behind == {1, 2} and joined.stream == {5, 6}
    assert joined.past == ("a", "b", "c") and joined.is_content and not joined.is_softmax
    assert not torch_followers.join_tags(tags[1:]).is_content
    assert torch_followers.join_tags([]).maps == frozenset()


def test_followers_of_summands():
    """Masks intersect; the entries of further maps have names of their own."""
    maps = [make_map(10 * i, 1, 2) for i in range(3)]
    tags = [
        Tag(frozenset(maps[:1]), followers=follow(entries=[0, 1], allowed=[True, True])),
        Tag(followers=follow(allowed=[False, True], pairs=[7, 8])),
        Tag(frozenset(maps[:1]), followers=follow(entries=[1, 0], pairs=[9, 9])),
        Tag(frozenset(maps[1:2]), followers=follow(entries=[10, 11])),
        Tag(frozenset(maps[:1]), followers=follow(entries=[0, 0])),  # of a map that has numbers
        Tag(frozenset(maps[2:]), followers=follow(entries=[20, 21], allowed=[True, False])),
    ]
    joined = torch_followers.join_followers(tags)
    assert {name: follower().tolist() for name, follower in joined.items()} == {
        "entries": [0, 1],
        "allowed": [False, False],
        "pairs": [7, 8],
        "entries 2": [10, 11],
        "entries 3": [20, 21],
    }
    assert torch_followers.join_followers([]) == {}
    left_out = [Tag(followers={"left out": lambda: torch.tensor([True])})] * 2
    assert torch_followers.join_followers(left_out)["left out"]().tolist() == [True]


def number_pairs(queries, keys):
    return torch.tensor(queries)[:, None] * PAIR + torch.tensor(keys)


@pytest.mark.parametrize(
    ("pairs", "axes", "changes"),
    [
        (number_pairs([0, 1, 2], [0, 1]), [1], (False, True)),
        (number_pairs([0, 1, 2], [0, 1]), [0], (True, False)),
        (number_pairs([0, 1, 2], [0, 1]), [0, 1], (True, True)),
        (number_pairs([0, 1, 2], [0, 1]), [], (False, False)),
        (number_pairs([4, 4], [0, 1]), [0], (False, False)),
        (number_pairs([0, 1], [0, 1])[None].expand(3, 2, 2), [0], (False, False)),
        (torch.full((2, 3), -1), [0, 1], (False, False)),
        (torch.tensor([[-1, PAIR], [-1, PAIR + 1]]), [0], (False, True)),
        (torch.tensor([[-1], [PAIR + 3]]), [0], (False, False)),  # one pair alone is known
    ],
)
def test_which_of_query_and_key_changes_along_axes(pairs, axes, changes):
    tag = Tag(followers={"pairs": lambda: pairs})
    assert torch_followers.find_changes(tag, axes) == changes


def test_of_no_pairs_no_change_is_known():
    assert torch_followers.find_changes(Tag(), [0]) is None
    empty = Tag(followers={"pairs": lambda: torch.zeros(0, 3, dtype=torch.long)})
    assert torch_followers.find_changes(empty, [0]) is None


def test_a_product_sums_over_tokens_where_the_ends_are_of_other_rows():
    linear_map = make_map(0, 3, 4)
    numbers = torch.arange(12).reshape(3, 4)
    query = Tag(frozenset([linear_map]), followers={"entries": lambda: numbers})
    term = Term(("nd", "md", "nm"), {}, query, Tag())
    assert torch_followers.sums_tokens(term, "n") and not torch_followers.sums_tokens(term, "d")
    assert not torch_followers.sums_tokens(Term(("nd", "md", "nm"), {}, Tag(), Tag()), "n")
    repeated = Tag(query.maps, followers={"entries": lambda: numbers[[0, 0, 1]]})
    assert torch_followers.sums_tokens(Term(("nd", "md", "nm"), {}, repeated, Tag()), "n")
    maps = frozenset([linear_map, make_map(12, 3, 4)])  # the first row of either map is a token
    joined = Tag(maps, followers={"entries": lambda: torch.tensor([[0, 1], [12, 13]])})
    term = Term(("nd", "md", "nm"), {}, joined, Tag())
    assert torch_followers.sums_tokens(term, "n") and not torch_followers.sums_tokens(term, "d")
    for numbers_of_one in ([[0, 1], [4, 5]], [[12, 13], [16, 17]]):
        one = Tag(maps, followers={"entries": lambda a=numbers_of_one: torch.tensor(a)})
        assert torch_followers.sums_tokens(Term(("nd", "md", "nm"), {}, one, Tag()), "n")


def test_axes_whose_ends_are_of_one_row_are_features():
    linear_map = make_map(8, 3, 4)
    numbers = torch.arange(8, 20).reshape(3, 2, 2)
    tag = Tag(frozenset([linear_map]), followers={"entries": lambda: numbers})
    same = torch_followers.has_same_rows
    assert same(tag, [1, 2]) and same(tag, [1]) and same(tag, [])
    assert not same(tag, [0]) and not same(tag, [0, 2])
    assert not same(Tag(frozenset([linear_map])), [1])  # without numbers
    assert not same(Tag(followers=tag.followers), [1])  # without maps
    unknown = Tag(frozenset([make_map(50, 3, 4)]), followers=tag.followers)
    assert not same(unknown, [1])  # entries of other maps
    empty = Tag(tag.maps, followers={"entries": lambda: torch.zeros(0, 2, dtype=torch.long)})
    assert not same(empty, [1])


def test_the_features_of_a_map_that_a_tensor_has():
    """Of all its numbers; those of other maps and none do not count."""
    linear_map = make_map(8, 3, 4)
    followers = follow(**{"entries": [8, 13, 3], "entries 2": [11, 40, -1], "pairs": [9, 9, 9]})
    tag = Tag(followers=followers)
    features = torch_followers.find_features(tag, linear_map)
    assert features.tolist() == [True, True, False, True]
    assert torch_followers.find_features(Tag(), linear_map) is None
    assert torch_followers.find_features(tag, make_map(50, 3, 4)) is None


def test_a_follower_gives_its_tensor():
    tensor = torch.ones(2)
    assert torch_followers.keep_follower(tensor)() is tensor
