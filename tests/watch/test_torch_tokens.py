"""Which token a token may attend to, where keys are others than the tokens of the queries."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch import torch_tokens  # noqa: E402
from rank_collapse.watch.recorder import LeftOut  # noqa: E402
from rank_collapse.watch.torch_tags import Map, Source, Tag, Term  # noqa: E402
from rank_collapse.watch.torch_tokens import (  # noqa: E402
    Tokens,
    choose_term,
    find_allowed_tokens,
    find_shared_sources,
    join_tokens,
)
from tests.oracles.measured_layers import (  # noqa: E402
    RIGHT,
    Attention,
    D,
    N,
    Stack,
    X,
    compute_entropy,
    compute_ratio,
    heads,
    join,
    nn,
    pad,
    watch_step,
)

ALLOWED = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]], dtype=torch.bool)


def make_tokens(index, keys, is_cross=False):
    index, keys = torch.tensor([index]), None if keys is None else torch.tensor([keys])
    return Tokens(torch.zeros(8, 2), index, keys, torch.zeros(1), is_cross, ())


def test_keys_in_another_order_are_those_of_their_tokens():
    tokens = make_tokens([4, 5, 6], [6, 4, 5])
    allowed = find_allowed_tokens(tokens, ALLOWED)
    assert torch.equal(allowed, ALLOWED[..., [1, 2, 0]])


def test_of_keys_that_lack_the_token_of_a_query_nothing_is_known():
    """k = tokens[1:]: token 4 is no key, and not the first one."""
    assert find_allowed_tokens(make_tokens([4, 5, 6], [5, 6]), ALLOWED[..., :2]) is None


def test_keys_of_other_tokens_and_unknown_ones_are_unknown():
    assert find_allowed_tokens(make_tokens([4, 5, 6], None), ALLOWED) is None
    assert find_allowed_tokens(make_tokens([4, 5, 6], [1, 2, 3], is_cross=True), ALLOWED) is None


def test_own_keys_are_as_they_are():
    assert find_allowed_tokens(make_tokens([4, 5, 6], [4, 5, 6]), ALLOWED) is ALLOWED


def test_the_tokens_of_a_product_for_each_example_are_joined(monkeypatch):
    """Each example once; where masks or sources differ, which example has which is unknown."""
    monkeypatch.setattr(torch_tokens, "read_tokens", lambda part: part)
    first, second = (make_tokens(index, index) for index in ([0, 1], [2, 3]))
    allowed = torch.ones(1, 2, 2, dtype=torch.bool)
    for parts in ([first, second], [second, first, second]):
        joined = join_tokens(first, parts, allowed)
        assert joined.index.tolist() == joined.keys.tolist() == [[0, 1], [2, 3]]
        assert joined.order.tolist() == [0, 1]
    assert join_tokens(first, [first, first], allowed) is first
    causal = torch.cat([allowed, allowed.tril()])
    for other, mask in (
        (second, causal),
        (second._replace(sources=(1,)), allowed),
        (second._replace(keys=first.keys), allowed),
    ):
        with pytest.raises(LeftOut, match="its products have different tokens"):
            join_tokens(first, [first, other], mask)


class HeadsFirst(Attention):
    """Queries and keys are [h, b, n, k], and padding is hidden by a mask of its own."""

    def forward(self, x):
        q, k, v = (heads(part(x)).transpose(0, 1) for part in (self.q, self.k, self.v))
        scores = (q @ k.mT / 3).masked_fill(RIGHT[:, None] == 0, -torch.inf)
        p = scores.softmax(-1)
        self.kept = x.detach(), p.detach().transpose(0, 1)
        return self.o(join((p @ v).transpose(0, 1)))


def test_keys_are_those_of_their_example_where_heads_come_first():
    model = Stack(lambda self, x, mask: self.attentions[0](x), HeadsFirst())
    row, _ = watch_step(model, pad(RIGHT))
    x, p = model.attentions[0].kept
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x, RIGHT)], 1e-4)
    assert row["attention_entropy"] == pytest.approx([compute_entropy(p, RIGHT)], 1e-4)


class Reordered(Attention):
    """The second head has the queries of its tokens in another order."""

    def forward(self, x):
        first, second = heads(self.q(x)).unbind(1)
        q = torch.stack([first, second[:, [0, 2, 1, *range(3, x.shape[1])]]], dim=1)
        p = (q @ heads(self.k(x)).mT / 3).softmax(-1)
        return self.o(join(p @ heads(self.v(x))))


def test_heads_with_other_tokens_are_left_out_with_this_reason():
    model = Stack(lambda self, x, mask: self.attentions[0](x), Reordered())
    row, watched = watch_step(model, X)
    assert "its heads have different tokens" in watched.describe()
    assert "attention_entropy" not in row and "residual_ratio" not in row


class Reused(Attention):
    """Takes the queries of another layer, if it gets any."""

    def forward(self, x, q=None):
        q = heads(self.q(x)) if q is None else q
        p = (q @ heads(self.k(x)).mT / 3).softmax(-1)
        return x + self.o(join(p @ heads(self.v(x)))), q


def test_queries_of_an_earlier_layer_are_left_out_with_this_reason():
    def share_queries(self, x, mask):
        first, second = self.attentions
        x, q = first(x)
        return second(x, q)[0]

    row, watched = watch_step(Stack(share_queries, Reused(), Reused()), X)
    assert "no weights: its queries were made in another layer" in watched.describe()
    assert "Error" not in watched.describe() and row["residual_ratio"][0] > 0


def make_map(start, *, rows=3, width=2, is_held=True, tag=None):
    """Makes a map with entries from `start` on, whose source has so many rows."""
    matrix = torch.zeros(rows, width) if is_held else None
    source = Source(tag or Tag(), [0, 1], rows, matrix)
    return Map(source, (), (), start, rows * width, width, True)


def make_tag(*maps, root, past=()):
    behind = frozenset({root, *(linear_map.source for linear_map in maps)})
    return Tag(frozenset(maps), behind, past, frozenset({root}))


def make_term(query, key):
    return Term(("nd", "md", "nm"), {}, query, key)


def test_of_several_products_that_of_the_latest_queries_is_chosen():
    """A product of the same tokens comes first; else what is held, and comes from most layers."""
    late = make_tag(make_map(0), make_map(90), root=1, past=("a",))
    early = make_tag(make_map(40), root=1, past=("a", "b"))
    terms = [make_term(tag, tag) for tag in (early, late)]
    for order in (terms, terms[::-1]):
        assert choose_term(order) is terms[1]
    other = make_tag(make_map(95, rows=5), root=2)
    across = [make_term(tag, other) for tag in (early, late)]
    assert choose_term([*across, terms[0]]) is terms[0]
    for order in (across, across[::-1]):
        assert choose_term(order) is across[0]
    partly = make_tag(make_map(60, is_held=False), make_map(70), root=1, past=("a", "b", "c"))
    assert choose_term([make_term(partly, other), *across]) is across[0]


def test_tokens_behind_several_maps_are_those_that_keys_share():
    """Of two tensors behind the queries; none that an earlier layer dropped."""
    first, second = make_map(0), make_map(10)
    query = make_tag(first, second, root=1)
    key_map = make_map(20, rows=4)
    for shared in ([second], [first, second]):
        behind = {1, key_map.source, *(linear_map.source for linear_map in shared)}
        key = Tag(frozenset({key_map}), frozenset(behind), (), frozenset({1}))
        sources = find_shared_sources([first, second], query, key)
        assert sources == [linear_map.source for linear_map in shared]
    first.source.matrix = None
    assert find_shared_sources([first, second], query, key) == []  # of the same root


def test_the_places_of_rows_are_traced_through_earlier_maps():
    """Where both ends of a row are of one row, or else one row of a source for each."""
    first = make_map(0)
    trace = torch_tokens._trace_source
    for numbers, places in (
        ([[4, 5], [0, 1], [2, 3]], [2, 0, 1]),
        ([[4, 5, 0], [0, 1, 2], [2, 3, 4]], [0, 1, 2]),  # ends of two rows
        ([[9, 9], [0, 1], [2, 3]], [0, 1, 2]),  # an end of none
    ):
        tag = Tag(frozenset({first}), followers={"entries": lambda a=numbers: torch.tensor(a)})
        source = Source(tag, [0, 1], 3, torch.zeros(3, len(numbers[0])))
        assert trace(source, {first.source: 0}, 3).tolist() == places
        two = {first.source: 0, make_map(50).source: 3}
        is_traced = numbers[0] == [4, 5]
        traced = trace(source, two, 3)
        assert (traced.tolist() == places) if is_traced else traced is None
    assert trace(Source(Tag(), [0, 1], 4), {first.source: 0}, 3) is None


def test_rows_that_examples_do_not_have_alike_are_no_heads():
    for rows in ([[0, 1], [0, 1], [2, 3]], [[0, 1], [2, 3], [2, 3]], [[0, 1], [0, 2]]):
        with pytest.raises(LeftOut, match="its heads have different tokens"):
            torch_tokens._split_heads(torch.tensor(rows))
    index, order, count = torch_tokens._split_heads(torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]))
    assert (index.tolist(), order.tolist(), count) == ([[0, 1], [2, 3]], [0, 2, 1, 3], 2)


def test_entries_of_a_factor_are_expanded_to_the_axes_of_scores():
    numbers = torch.arange(6).reshape(2, 3)
    tag = Tag(frozenset({make_map(0)}), followers={"entries": lambda: numbers})
    read, sizes = torch_tokens._read_entries, {"b": 2, "h": 4, "n": 3, "d": 3, "m": 5}
    entries = read(tag, "bn", "bhn", sizes)  # without features
    assert torch.equal(entries, numbers[:, None, :, None].expand(2, 4, 3, 2))
    entries = read(tag, "bd", "bh", sizes)
    assert torch.equal(entries, numbers[:, None, [0, -1]].expand(2, 4, 2))
    assert read(Tag(followers=tag.followers), "bn", "bhn", sizes) is None


class Pooled(Attention):
    """Keys and values are means of three tokens, which no map made."""

    def forward(self, x):
        k, v = (part(x).unflatten(1, (3, 3)).mean(2) for part in (self.k, self.v))
        p = (heads(self.q(x)) @ heads(k).mT / 3).softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ heads(v)))


def test_tokens_are_those_of_the_queries_where_keys_are_unknown():
    model = Stack(lambda self, x, mask: self.attentions[0](x), Pooled())
    row, watched = watch_step(model, X)
    x, p = model.attentions[0].kept
    assert row["residual_ratio"] == pytest.approx([compute_ratio(x)], 1e-4), watched
    assert row["attention_entropy"] == pytest.approx([compute_entropy(p)], 1e-4)


class Unmapped(Attention):
    """Queries are the tokens themselves, keys those that `choose` gives."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose

    def forward(self, x, others):
        k, v = (self.choose(part, x, others) for part in (self.k, self.v))
        return (x @ k.mT / 4).softmax(-1) @ v


UNKNOWN = {
    "other tokens": lambda part, x, others: part(others),
    "fewer tokens": lambda part, x, others: part(x[:, ::2]),
    "means": lambda part, x, others: part(x).unflatten(1, (3, 3)).mean(2),
    "more tokens": lambda part, x, others: part(torch.cat([x, x.tanh()], dim=1)),
}


@pytest.mark.parametrize("choose", UNKNOWN.values(), ids=UNKNOWN)
def test_queries_of_no_map_are_left_out_where_keys_do_not_tell_their_tokens(choose):
    model = Stack(lambda self, x, others: self.attentions[0](x, others), Unmapped(choose))
    row, watched = watch_step(model, X, torch.rand(len(X), N, D))
    reason = "no weights: the linear map that made its queries is unknown"
    assert reason in watched.describe() and "residual_ratio" not in row


class Joint(Attention):
    """Tokens of two inputs with maps of their own attend to each other, or to other tokens."""

    def __init__(self, width):
        super().__init__()
        self.text = nn.ModuleList(nn.Linear(width, D) for _ in range(3))

    def forward(self, x, text, others=None):
        q, k, v = (
            heads(torch.cat([first(text * 1), second(x * 1)], dim=1))
            for first, second in zip(self.text, (self.q, self.k, self.v), strict=True)
        )
        if others is not None:
            k, v = heads(self.k(others)), heads(self.v(others))
        p = (q @ k.mT / 3).softmax(-1)
        self.kept = p.detach()
        return self.o(join(p @ v))


@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("width", [D, 5])
def test_queries_of_two_inputs_are_of_one_width(width, is_cross):
    text, others = torch.rand(len(X), 4, width), torch.rand(len(X), 6, D)

    def body(self, x, others):
        return self.attentions[0](x, text, others)

    model = Stack(body, Joint(width))
    row, watched = watch_step(model, X, *[others] * is_cross)
    if width != D:
        reason = "no weights: its queries were made from tensors of several widths"
        assert reason in watched.describe() and not any("entropy" in name for name in row)
    else:
        name = "cross.attention_entropy" if is_cross else "attention_entropy"
        assert row[name] == pytest.approx([compute_entropy(model.attentions[0].kept)], 1e-4)
    if width == D and not is_cross:
        joined = torch.cat([text, X], dim=1)
        assert row["residual_ratio"] == pytest.approx([compute_ratio(joined)], 1e-4), watched


def test_a_query_that_no_map_made_has_an_unknown_token():
    class Added(Attention):
        def forward(self, x):
            q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
            extra = self.o.weight[None, None, :1, :8].expand(len(x), 2, 1, 8)
            p = (torch.cat([q[:, :, 1:], extra], dim=2) @ k.mT).softmax(-1)
            return self.o(join(p @ v))

    model = Stack(lambda self, x, mask: self.attentions[0](x), Added())
    row, watched = watch_step(model, X)
    assert "no weights: the tokens of its queries are unknown" in watched.describe()
    assert "attention_entropy" not in row
