"""Which token a token may attend to, where keys are others than the tokens of the queries."""

import pytest

torch = pytest.importorskip("torch")

from rank_collapse.watch import torch_tokens  # noqa: E402
from rank_collapse.watch.recorder import LeftOut  # noqa: E402
from rank_collapse.watch.torch_tokens import (  # noqa: E402
    Tokens,
    find_allowed_tokens,
    join_tokens,
)
from tests.oracles.measured_layers import (  # noqa: E402
    RIGHT,
    Attention,
    Stack,
    X,
    compute_entropy,
    compute_ratio,
    heads,
    join,
    pad,
    watch_step,
)

ALLOWED = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 1, 1]]], dtype=torch.bool)


def make_tokens(index, keys, is_cross=False):
    index, keys = torch.tensor([index]), None if keys is None else torch.tensor([keys])
    return Tokens(torch.zeros(8, 2), index, keys, torch.zeros(1), is_cross, ())


def test_keys_in_another_order_are_those_of_their_tokens():
    tokens = make_tokens([4, 5, 6], [6, 4, 5])
    found = find_allowed_tokens(tokens, ALLOWED)
    assert torch.equal(found, ALLOWED[..., [1, 2, 0]])


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
