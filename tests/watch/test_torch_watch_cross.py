"""Cross-attention in a watch: which keys are of other tokens, and the padding of its queries."""

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.oracles.measured_layers import (
    LEFT,
    RIGHT,
    Attention,
    B,
    D,
    F,
    Stack,
    X,
    check_layers,
    compute_entropy,
    compute_ratio,
    heads,
    join,
    make_maps,
    nn,
    norm,
    pad,
    torch,
    watch_step,
)


def share_pairs(self, x, mask):
    kv = None
    for i, attention in enumerate(self.attentions):
        x = x + attention(norm(x), mask, kv if i % 2 else None)
        kv = attention.kv
    return x


def share_first(self, x, mask):
    """All attentions have the keys of the embedding, by maps of their own."""
    kv = tuple(heads(part(norm(x))) for part in self.parts)
    for attention in self.attentions:
        x = x + attention(norm(x), mask, kv)
        x = x + self.mlp(x).relu()
    return x


def share_one(self, x, mask):
    """The first attention's keys, and values of the last layer's input."""
    k = None
    for attention in self.attentions:
        y = attention(norm(x), mask, None if k is None else (k, heads(attention.v(norm(x)))))
        k, x = attention.kv[0], x + y
    return x


def mask_keys(scores, mask):
    return scores.masked_fill(mask[:, None, None] == 0, -torch.inf).softmax(-1)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("body", [share_pairs, share_first, share_one])
def test_keys_of_an_earlier_layer_are_of_the_same_tokens(body, is_padded):
    torch.manual_seed(0)
    options = {"parts": make_maps(D, D, count=2), "mlp": nn.Linear(D, D)}
    weigh = mask_keys if is_padded else None
    model = Stack(body, *(Attention(weigh) for _ in range(4)), **options)
    watched = check_layers(model, *((pad(RIGHT), RIGHT) if is_padded else ()))
    assert not any(name.startswith("cross.") for name in watched.rows[0])


def test_an_encoder_of_the_same_input_has_other_tokens():
    model = torch.nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x, x).square().mean()

    row, _ = watch_step(Both(), torch.randn(2, 5, 8))
    assert len(row["residual_ratio"]) == 2 and "cross.attention_entropy" in row


def test_padding_of_the_keys_is_none_of_the_queries():
    """An encoder of as many padded tokens ran before; the queries come from other ones."""

    def read_encoder(self, x, others):
        encoder, across = self.attentions
        states = others + encoder(others)
        return across(x, kv=(heads(across.k(states)), heads(across.v(states))))

    def hide(scores, mask):
        return scores.masked_fill(RIGHT[:, None, None] == 0, -torch.inf).softmax(-1)

    model = Stack(read_encoder, Attention(hide), Attention())
    row, watched = watch_step(model, X, pad(RIGHT))
    (encoded, _), (_, p) = (attention.kept for attention in model.attentions)
    assert row["residual_ratio"][0] == pytest.approx(compute_ratio(encoded, RIGHT), 1e-4)
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    assert entropy == pytest.approx(compute_entropy(p), 1e-4), watched.describe()


LOOKED_UP = {
    "an index": lambda table, ids: table[ids],
    "an index of one more axis": lambda table, ids: table[ids[:, :, None]][:, :, 0],
    "an embedding": lambda table, ids: torch.nn.functional.embedding(ids, table),
}


@pytest.mark.parametrize("look_up", LOOKED_UP.values(), ids=LOOKED_UP)
def test_tokens_from_a_table_are_other_tokens_than_latents(look_up):
    def read_latents(self, ids, mask):
        across, within = self.attentions
        tokens, x = look_up(self.table, ids), self.latents.expand(len(ids), -1, -1)
        x = x + across(x, kv=(heads(across.k(tokens)), heads(across.v(tokens))))
        return x + within(x)

    torch.manual_seed(0)
    parts = {"table": nn.Parameter(torch.randn(7, D)), "latents": nn.Parameter(torch.randn(4, D))}
    model = Stack(read_latents, Attention(), Attention(), **parts)
    row, watched = watch_step(model, torch.tensor([[0, 3, 5], [6, 1, 2]]))
    (_, across), (reads, within) = (attention.kept for attention in model.attentions)
    check_values(row["cross.attention_entropy"], [compute_entropy(across), None])
    check_values(row["attention_entropy"], [None, compute_entropy(within)])
    check_values(row["residual_ratio"], [None, compute_ratio(reads)])
    assert not watched.alarms


def check_values(values, expected):
    """Checks one value of each attention, where None is expected to be NaN."""
    expected = [np.nan if value is None else value for value in expected]
    np.testing.assert_allclose(values, expected, rtol=1e-4)


OTHER_ROWS = {
    "pooled": lambda x: x.unflatten(1, (3, 3)).mean(2),
    "some tokens": lambda x: x[:, :4] * 1,
    "twice": lambda x: torch.cat([x, x.tanh()], dim=1),
}


@pytest.mark.parametrize("choose", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_keys_of_other_rows_of_an_earlier_layer_are_other_tokens(choose):
    def read_earlier(self, x, mask):
        first, second, *later = self.attentions
        x = x + first(x)
        other = choose(self.map(x))
        x = x + second(x)
        for attention in later:
            x = x + attention(x, kv=(heads(attention.k(other)), heads(attention.v(other))))
        return x

    torch.manual_seed(0)
    model = Stack(read_earlier, *(Attention() for _ in range(4)), map=nn.Linear(D, D))
    row, _ = watch_step(model, X)
    entropies = [compute_entropy(attention.kept[1]) for attention in model.attentions]
    check_values(row["attention_entropy"], [*entropies[:2], None, None])
    check_values(row["cross.attention_entropy"], [None, None, *entropies[2:]])


class SelfThenCross(nn.Module):
    """Attends to its tokens and then to other ones, in one call."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, others):
        within, across = self.parts
        p = mask_keys(heads(within.q(x)) @ heads(within.k(x)).mT / 3, RIGHT)
        x = x + within.o(join(p @ heads(within.v(x))))
        p = (heads(across.q(x)) @ heads(across.k(others)).mT / 3).softmax(-1)
        self.kept = p.detach()
        return across.o(join(p @ heads(across.v(others))))


def test_padding_of_the_queries_is_that_of_the_attention_before_in_the_same_call():
    def read_both(self, x, others):
        return self.attentions[0](x, others)

    model = Stack(read_both, SelfThenCross())
    row, watched = watch_step(model, pad(RIGHT), X[:, :7].flip(1))
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    expected = compute_entropy(model.attentions[0].kept, RIGHT)
    assert entropy == pytest.approx(expected, 1e-4), watched.describe()


class TwoMemories(nn.Module):
    """A block that attends to its tokens, and then to the tokens of two memories."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.MultiheadAttention(D, 1, batch_first=True, bias=False) for _ in range(3)
        )

    def forward(self, x, memories):
        within, *across = self.parts
        x = x + within(x, x, x)[0]
        self.kept = []
        for attention, memory in zip(across, memories, strict=True):
            update, p = attention(x, memory, memory)
            self.kept.append(p.detach()[:, None])
            x = x + update
        return x


def test_a_second_cross_attention_of_a_layer_has_a_reason():
    torch.manual_seed(0)
    blocks = [TwoMemories() for _ in range(2)]

    def read_both(self, x, memories):
        for block in self.attentions:
            x = block(x, memories)
        return x

    memories = torch.randn(2, len(X), 4, D)
    row, watched = watch_step(Stack(read_both, *blocks), X, memories)
    check_values(row["cross.attention_entropy"], [compute_entropy(b.kept[0]) for b in blocks])
    assert len(row["attention_entropy"]) == 2
    for i in range(2):
        names = [f"attentions.{i}.parts.{part}" for part in (1, 2)]
        reason = f"its layer has another one: {names[0]} is measured"
        assert f"  {names[1]}: no cross-attention: {reason}" in watched.describe().splitlines()


class Queries(nn.Module):
    """Attends to its tokens; then a part of them attends to others.

    Args:
        choose: choose(x) gives the tokens that attend.
    """

    def __init__(self, choose):
        super().__init__()
        self.parts, self.choose = nn.ModuleList(Attention() for _ in range(2)), choose

    def forward(self, x, others):
        within, across = self.parts
        p = (heads(within.q(x)) @ heads(within.k(x)).mT / 3).masked_fill(
            LEFT[:, None, None] == 0, -torch.inf
        )
        x = self.choose(x + within.o(join(p.softmax(-1) @ heads(within.v(x)))))
        p = (heads(across.q(x)) @ heads(across.k(others)).mT / 3).softmax(-1)
        self.kept = p.detach()
        return across.o(join(p @ heads(across.v(others))))


@pytest.mark.parametrize("count", [9, 4])
def test_fewer_queries_than_the_attention_before_have_all_their_tokens(count):
    """Padding is known of as many tokens as that attention has; of others it is not."""

    def read_both(self, x, others):
        return self.attentions[0](x, others)

    model = Stack(read_both, Queries(lambda x: x[:, -count:]))
    row, watched = watch_step(model, pad(LEFT), X[:, :7].flip(1))
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    mask = LEFT if count == 9 else None
    expected = compute_entropy(model.attentions[0].kept, mask)
    assert entropy == pytest.approx(expected, 1e-4), watched.describe()


@pytest.mark.parametrize("start", [0, 3])
def test_padding_of_the_queries_is_that_of_the_last_attention_before(start):
    """The first attention has no mask; the second has one, and may have fewer tokens; the third
    attends to other tokens."""
    mask = RIGHT[:, start:]

    def body(self, x, others):
        first, second, across = self.attentions
        x = (x + first(x))[:, start:]
        x = x + second(x)
        return across(x, kv=(heads(across.k(others)), heads(across.v(others))))

    def hide(scores, _):
        return scores.masked_fill(mask[:, None, None] == 0, -torch.inf).softmax(-1)

    model = Stack(body, Attention(), Attention(hide), Attention())
    row, watched = watch_step(model, X, X[:, :7].flip(1))
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    expected = compute_entropy(model.attentions[2].kept[1], mask)
    assert entropy == pytest.approx(expected, 1e-4), watched.describe()


def test_a_mask_of_the_call_that_hides_keys_is_none_of_as_many_queries():
    """No attention came before, which would tell the padding of the queries."""
    others = X.flip(1)

    def body(self, x, mask):
        (across,) = self.attentions
        return across(x, mask, kv=(heads(across.k(others)), heads(across.v(others))))

    model = Stack(body, Attention(mask_keys))
    row, watched = watch_step(model, X, RIGHT)
    (entropy,) = (v for v in row["cross.attention_entropy"] if v == v)
    expected = compute_entropy(model.attentions[0].kept[1])
    assert entropy == pytest.approx(expected, 1e-4), watched.describe()


def test_attention_to_other_tokens_may_have_a_key_more():
    """A key of zeros beside them, which is no token."""
    kept = []

    def attend(q, k, v, mask):
        kept.append(F.pad(q @ k.mT / 3, (0, 1)).softmax(-1))
        return kept[0] @ F.pad(v, (0, 0, 0, 1))

    def body(self, x, others):
        (across,) = self.attentions
        return across(x, kv=(heads(across.k(others)), heads(across.v(others))))

    model = Stack(body, Attention(attend=attend))
    row, watched = watch_step(model, X, torch.rand(B, 5, D))
    expected = compute_entropy(kept[0].detach())
    assert row["cross.attention_entropy"] == pytest.approx([expected], 1e-4), watched
