"""Weights of attention, which tokens exist, and documents, against loops over entries."""

import itertools
import math

import pytest

pytest.importorskip("torch")

from rank_collapse.watch import torch_products as products
from rank_collapse.watch.recorder import LeftOut
from rank_collapse.watch.torch_products import (
    Weights,
    compute_dot_weights,
    is_allowed as allowed,
)
from tests.oracles.torch_models import torch


@pytest.mark.parametrize("mask", [torch.tensor([True, False]), torch.tensor([1, 0])])
@pytest.mark.parametrize("added", [torch.tensor([0.0, -torch.inf]), torch.tensor([0.0, -1e9])])
def test_masks_of_all_kinds(mask, added):
    assert allowed(mask).tolist() == allowed(added).tolist() == [True, False]


def test_causal_weights_of_fewer_queries_than_keys_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 4, generator=generator) for n in (3, 5))
    dot_weights = compute_dot_weights(q, k, k, is_causal=True)
    product = torch.nn.functional.scaled_dot_product_attention(
        q, k, torch.eye(5).expand(2, 5, 5), is_causal=True
    )
    torch.testing.assert_close(dot_weights.p, product)


RANDOM = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=RANDOM)


def draw_mask(*shape, share=0.6):
    return torch.rand(*shape, generator=RANDOM) < share


def test_of_many_queries_evenly_spaced_ones_are_measured():
    assert products.choose_rows(5, "cpu").tolist() == [0, 1, 2, 3, 4]
    assert products.choose_rows(64, "cpu").tolist() == [*range(64)]
    rows = products.choose_rows(640, "cpu").tolist()
    assert (rows[0], rows[-1], len(rows)) == (0, 639, products.ROWS)
    assert {b - a for a, b in itertools.pairwise(rows)} == {10, 11}


MASKS = {
    "none": None,
    "of all": draw_mask(5, 7),
    "of examples": draw_mask(2, 1, 5, 7),
    "of heads": draw_mask(2, 4, 5, 7),
    "of keys": draw_mask(2, 1, 1, 7),
    "added": torch.where(draw_mask(2, 1, 5, 7), draw(2, 1, 5, 7), -torch.inf),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_weights_are_those_of_the_kernel(mask, scale, num_groups):
    """Of examples and heads one after the other, keys of a group of heads beside each of them."""
    q, k = draw(2, 4, 5, 3), draw(2, num_groups, 7, 3)
    values = draw(2, num_groups, 7, 2)  # whose width has no say in the weights
    weights = compute_dot_weights(q, k, values, mask, scale=scale, enable_gqa=num_groups != 4)
    keys = k.repeat_interleave(4 // num_groups, dim=1)
    scores = (1 / math.sqrt(3) if scale is None else scale) * torch.einsum(
        "bhnd,bhmd->bhnm", q, keys
    )
    keep = torch.ones(2, 4, 5, 7, dtype=torch.bool)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        keep = (mask if is_bool else mask > -torch.inf).expand(2, 4, 5, 7)
        scores = torch.where(keep, scores + (0 if is_bool else mask), -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0)  # a query without a key has no weight
    torch.testing.assert_close(weights.p, expected.flatten(0, 1))
    assert weights.rows.tolist() == [0, 1, 2, 3, 4]
    kept = keep.any(dim=1)  # a key of one head is a key
    torch.testing.assert_close(weights.allowed.expand(2, 5, 7), kept)


@pytest.mark.parametrize(
    ("queries", "keys", "is_grouped"),
    [
        ((4, 5, 3), (2, 7, 3), True),  # without an axis of examples
        ((2, 1, 5, 3), (2, 4, 7, 3), False),  # queries that all heads share
        ((2, 4, 5, 3), (2, 1, 7, 3), False),
        ((4, 5, 3), (4, 7, 3), False),
    ],
)
def test_weights_of_any_heads_are_those_of_torch(queries, keys, is_grouped):
    q, k = draw(*queries), draw(*keys)
    values = torch.eye(7).expand(*keys[:-1], 7)
    product = torch.nn.functional.scaled_dot_product_attention(q, k, values, enable_gqa=is_grouped)
    weights = compute_dot_weights(q, k, values, enable_gqa=is_grouped)
    torch.testing.assert_close(weights.p, product.reshape(-1, 5, 7))


def test_a_mask_without_an_axis_of_examples_is_of_each_example_or_of_each_head():
    """Of three axes: [g, n, m] for queries [g, n, k], and [h, n, m] for queries [b, h, n, k]."""
    mask, q, k = draw_mask(4, 5, 7), draw(2, 4, 5, 3), draw(2, 4, 7, 3)
    one = compute_dot_weights(q[0], k[0], k[0], mask)
    assert torch.equal(one.allowed, mask)
    both = compute_dot_weights(q, k, k, mask)
    assert torch.equal(both.allowed, mask.repeat(2, 1, 1))
    torch.testing.assert_close(both.p[:4], one.p)


def test_masks_that_content_chose_hide_no_key():
    q, mask, static = draw(2, 4, 5, 3), draw_mask(2, 4, 5, 5), draw_mask(2, 1, 5, 5)
    chosen = compute_dot_weights(q, q, q, mask, is_chosen=True)
    assert chosen.allowed.all() and chosen.allowed.shape == (2, 5, 5)
    kept = compute_dot_weights(q, q, q, mask, is_chosen=True, static=lambda: static)
    assert torch.equal(kept.allowed, static[:, 0])
    plain = compute_dot_weights(q, q, q, mask)
    assert torch.equal(chosen.p, plain.p) and torch.equal(kept.p, plain.p)


def test_weights_of_any_layout_come_by_examples_heads_queries_and_keys():
    p = draw(3, 2, 5, 4).softmax(dim=0)  # [m, b, n, h]
    keep = draw_mask(3, 2, 5, 4)
    read = products.read_weights(p, keep, None, ("mbnh", "bmhd", "bnhd"), ["n"])
    assert torch.equal(read.p, p.permute(1, 3, 2, 0).flatten(0, 1))
    assert torch.equal(read.allowed, keep.permute(1, 3, 2, 0).flatten(0, 1))
    assert read.rows.tolist() == [0, 1, 2, 3, 4]
    whole = products.read_weights(p, None, None, ("mbnh", "bmhd", "bnhd"), ["n"])
    assert whole.allowed.all() and whole.allowed.shape == (8, 5, 3)


@pytest.mark.parametrize("num_keys", [7, 64])  # of 64 none has a large weight
def test_after_dropout_the_weights_before_are_read(num_keys):
    softmax = draw(2, 5, num_keys).div(num_keys**0.5).softmax(-1)
    kept = draw_mask(2, 5, num_keys, share=0.7)
    letters = ("bnm", "bmd", "bnd")

    def read(used, keep=None):
        return products.read_weights(used, keep, softmax, letters, ["n"]).p

    assert torch.equal(read(softmax), softmax)
    torch.testing.assert_close(read(softmax * kept / 0.7), softmax)
    assert torch.equal(read(softmax.flip(-1)), softmax.flip(-1))  # something else met the values
    keep = draw_mask(2, 5, num_keys)
    torch.testing.assert_close(read(softmax * keep, keep), softmax * keep)
    assert torch.equal(read(torch.zeros_like(softmax)), softmax)  # all is dropped


def test_where_only_weights_that_were_small_are_left_something_else_changed_them():
    softmax = torch.tensor([[[0.98, 0.01, 0.01]]])
    for used in (torch.tensor([[[0.0, 0.5, 0.5]]]), torch.zeros(1, 1, 3)):
        read = products.read_weights(used, None, softmax, ("bnm", "bmd", "bnd"), ["n"])
        assert torch.equal(read.p, used if used.any() else softmax)


def test_examples_are_sorted_and_their_heads_joined():
    weights = Weights(draw(6, 5, 7), torch.arange(5), draw_mask(6, 5, 7))
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # [h, e] becomes [e, h]
    ordered = products.sort_examples(weights, order, 3)
    assert torch.equal(ordered.p, weights.p[order])
    for e in range(3):
        expected = weights.allowed[e] | weights.allowed[e + 3]
        assert torch.equal(ordered.allowed[e], expected)
    by_example = weights._replace(allowed=draw_mask(3, 5, 7))
    by_heads = products.sort_examples(by_example, torch.arange(6), 3)
    assert torch.equal(by_heads.allowed, by_example.allowed)
    one = weights._replace(allowed=draw_mask(1, 5, 7))
    assert torch.equal(products.sort_examples(one, order, 3).allowed, one.allowed)


def test_weights_of_another_number_of_heads_have_the_keys_of_any():
    weights = Weights(draw(6, 5, 7), torch.arange(5), draw_mask(6, 5, 7))
    joined = products.keep_allowed(weights, torch.arange(9), 3)
    assert joined.p.shape == (0, 5, 7)
    for e in range(3):
        assert torch.equal(joined.allowed[e], weights.allowed[2 * e] | weights.allowed[2 * e + 1])
    for order, count in ((torch.tensor([1, 0, 2]), 3), (torch.arange(4), 4)):
        unknown = products.keep_allowed(weights, order, count).allowed
        assert unknown.shape == (1, 5, 7) and unknown.all()
    one = weights._replace(allowed=draw_mask(1, 5, 7))
    assert torch.equal(products.keep_allowed(one, torch.arange(9), 3).allowed, one.allowed)


class OwnKeys:
    def __init__(self, has):
        self.has = has

    def has_own_keys(self):
        return self.has


def test_the_weight_that_tokens_give_to_others_that_do_not_exist():
    p, exists = draw(4, 3, 5).softmax(-1), torch.arange(5) < torch.tensor([[3], [5]])
    rows = torch.tensor([0, 2, 4])
    weights = Weights(p, rows, torch.ones(1, 5, 5, dtype=torch.bool))
    masses = [
        sum((p[2 * e, i, j] + p[2 * e + 1, i, j]).item() / 2 for j in range(5) if not exists[e, j])
        for e in range(2)
        for i, row in enumerate(rows)
        if exists[e, row]
    ]
    crossing = products.compute_crossing(OwnKeys(True), weights, exists)
    assert crossing == pytest.approx(sum(masses) / len(masses), rel=1e-5)
    assert products.compute_crossing(OwnKeys(False), weights, exists) == 0
    assert products.compute_crossing(OwnKeys(True), weights._replace(p=p[:0]), exists) == 0
    assert products.compute_crossing(OwnKeys(True), weights, torch.zeros_like(exists)) == 0


def test_what_is_a_distribution():
    p = torch.tensor([[0.25, 0.75], [0.0, 0.0]])
    for weights, sums, is_one in (
        (p, True, True),
        (p + 0.009, False, True),
        (p[:1] + 0.009, True, True),
        (p[:1] + 0.011, False, False),
        (p - 0.1, False, False),
        (0.5 * p, False, True),
        (torch.zeros(2, 2), False, True),
        (torch.tensor([[1.01, -0.01]]), True, False),
    ):
        assert products.sums_to_one(weights) == sums
        assert products.is_distribution(weights) == is_one


def test_tokens_exist_that_attend_and_are_attended_to():
    """Padding may attend to itself; the last token of a causal text is no padding."""
    for _ in range(60):
        keep = draw_mask(1, 5, 5, share=0.5)
        exists = products.find_tokens(keep)[0].tolist()
        a = keep[0].tolist()
        places = range(5)
        lonely = [
            any(a[i][j] for j in places if j != i) and not any(a[j][i] for j in places if j != i)
            for i in places
        ]
        is_key = [any(a[j][i] for j in places) for i in places]
        last = max([i for i in places if is_key[i] and not lonely[i]], default=0)
        sees_ahead = any(a[i][last] for i in range(last))
        expected = [is_key[i] and any(a[i]) and not (lonely[i] and sees_ahead) for i in places]
        assert exists == expected
    causal = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    assert products.find_tokens(causal).all()
    padded = torch.ones(1, 4, 4, dtype=torch.bool)
    padded[:, :, 3] = False  # no one attends to the last but itself
    padded[:, 3, 3] = True
    assert products.find_tokens(padded).tolist() == [[True, True, True, False]]


def test_a_token_that_stands_again_is_found():
    index = torch.tensor([[4, 2, 4, 2, 4], [0, 1, 2, 3, 0], [5, 6, 7, 8, 9]])
    expected = [[n in row[:i] for i, n in enumerate(row)] for row in index.tolist()]
    assert products.find_repeated(index).tolist() == expected


def test_a_mask_fits_where_no_token_of_it_looks_outside():
    for _ in range(60):
        keep, mask = draw_mask(1, 4, 4, share=0.4), draw_mask(2, 4)
        fits = mask.any()
        for b, i in itertools.product(range(2), range(4)):
            if mask[b, i]:
                looks = [j for j in range(4) if keep[0, i, j]]
                fits = fits and bool(looks) and all(mask[b, j] for j in looks)
        assert products.fits_mask(mask, keep) == bool(fits)
    same = torch.arange(4) < torch.tensor([[2], [4]])
    keep = same[:, :, None] == same[:, None]
    assert products.fits_mask(same, keep)
    assert not products.fits_mask(torch.zeros_like(same), keep)


def test_attention_hides_what_a_mask_leaves_out_if_no_other_token_attends_to_it():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    keep = mask[:, None] | torch.eye(3, dtype=torch.bool)  # each token attends to itself
    assert products.hides_others(mask, keep)
    for place in ((0, 0, 2), (1, 2, 1), (1, 0, 2)):
        other = keep.clone()
        other[place] = True
        assert not products.hides_others(mask, other)
    assert not products.hides_others(mask, None)
    assert not products.hides_others(torch.ones_like(mask), keep)  # which leaves nothing out


def test_documents_begin_where_no_neighbour_attends():
    first = torch.tensor([[0, 0, 2, 2, 2, 5], [0, 0, 0, 0, 0, 0]])
    keep = (first[:, :, None] == first[:, None]) & torch.ones(6, 6, dtype=torch.bool).tril()
    exists, index = torch.ones(2, 6, dtype=torch.bool), torch.arange(12).reshape(2, 6) + 30
    numbers = products.number_documents(exists, keep, index)
    assert torch.equal(numbers, index.gather(1, first))
    exists[0, 5] = False
    numbers = products.number_documents(exists, keep, index)
    assert numbers[0].tolist() == [30, 30, 32, 32, 32, -1]
    across = keep.clone()
    across[1, 5, 0] = across[0, 4, 0] = True  # a token attends to another document
    assert products.number_documents(exists, across, index)[0].tolist() == [30] * 5 + [-1]
    unknown = products.number_documents(exists, None, index)
    assert unknown[0].tolist() == [30] * 5 + [-1] and unknown[1].tolist() == [36] * 6
    gap = torch.tensor([[True, False, True]])  # padding begins no document
    alone = torch.eye(3, dtype=torch.bool)[None]
    assert products.number_documents(gap, alone, torch.arange(3)[None]).tolist() == [[0, -1, 0]]


def test_weights_are_measured_by_document_and_head():
    """What goes to no key is one key more, whose share is the missing mass."""
    p = draw(4, 6, 6).softmax(-1)
    documents = torch.tensor([[0, 0, 0, 3, 3, -1], [6, 6, 6, 6, 6, 6]])
    same = documents[:, :, None] == documents[:, None]
    p = (p.unflatten(0, (2, 2)) * same[:, None]).flatten(0, 1)
    p = p / p.sum(-1, keepdim=True)
    weights = Weights(p, torch.arange(6), same)
    scalars = products.measure_weights(weights, documents)
    entropies = [
        [-sum(v * math.log(v) for v in p[2 * e + h, i].tolist() if v) for i in rows]
        for e, rows in ((0, (0, 1, 2)), (0, (3, 4)), (1, range(6)))
        for h in range(2)
    ]
    expected = torch.tensor([sum(row) / len(row) for row in entropies]).view(3, 2)
    torch.testing.assert_close(scalars["attention_entropy"], expected)
    assert "missing_mass" not in scalars
    half = products.measure_weights(weights._replace(p=0.5 * p), documents)
    torch.testing.assert_close(half["missing_mass"], torch.full((3, 2), 0.5))
    sums = 0.5 * expected + math.log(2)
    torch.testing.assert_close(half["attention_entropy"], sums)
    with pytest.raises(LeftOut, match="not a distribution over keys"):
        products.measure_weights(weights._replace(p=2 * p), documents)


def test_queries_without_weights_and_keys_of_padding_alone_do_not_count():
    """The first key is that of a query that exists: here the second one."""
    p = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.75, 0.25], [0.0, 0.2, 0.2], [1.0, 0.0, 0.0]])
    allowed = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 1, 1], [1, 0, 0]], dtype=torch.bool)
    documents = torch.tensor([[0, 0, 0, -1]])  # the last query is padding
    scalars = products.measure_weights(Weights(p[None], torch.arange(4), allowed[None]), documents)
    rows = [[0.75, 0.25, 0.0], [0.2, 0.2, 0.6]]  # what goes to no key is one key more
    entropies = [-sum(v * math.log(v) for v in row if v) for row in rows]
    assert scalars["attention_entropy"].item() == pytest.approx(sum(entropies) / 2, rel=1e-5)
    assert scalars["missing_mass"].item() == pytest.approx(0.6 / 2, rel=1e-5)
    assert scalars["sink_rate"].item() == (sum(row[0] for row in rows) / 2 > 0.3)


def test_an_example_without_tokens_does_not_count():
    """Nor its tokens, where the other examples are whole."""
    x = draw(3, 4, 2)
    documents = torch.tensor([[0] * 4, [-1] * 4, [8] * 4])
    expected = products.measure_tokens(x[[0, 2]], documents[[0, 2]], "read")
    scalars = products.measure_tokens(x, documents, "read")
    assert scalars.keys() == expected.keys()
    for name, value in expected.items():
        assert scalars[name].item() == pytest.approx(value.item(), rel=1e-5), name


def test_tokens_exist_where_each_attends_to_itself_alone():
    """Among others such tokens at the ends are padding."""
    alone = torch.eye(4, dtype=torch.bool)[None]
    pair = alone.clone()
    pair[0, 1, 2] = pair[0, 2, 1] = True
    assert products.find_tokens(torch.cat([alone, pair])).tolist() == [
        [True] * 4,
        [False, True, True, False],
    ]


def test_tokens_of_fewer_than_two_are_left_out():
    for shape, text in (((0, 3, 4), "0 examples of 3 tokens"), ((2, 1, 4), "2 examples of 1 tok")):
        documents = torch.zeros(shape[:2], dtype=torch.long)
        with pytest.raises(LeftOut, match=text):
            products.measure_tokens(torch.zeros(shape), documents, "read")
    two = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    scalars = products.measure_tokens(two, torch.zeros(1, 2, dtype=torch.long), "read")
    assert scalars["token_cosine"].item() == pytest.approx(0.0, abs=1e-6)
    assert scalars["residual_ratio"].item() == pytest.approx(1.0)  # ½ everywhere, against 1
