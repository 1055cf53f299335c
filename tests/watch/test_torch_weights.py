"""Which products have weights of attention: mixtures, means, forms of a call, what is left out."""

import pytest

pytest.importorskip("torch")
from rank_collapse.watch.torch_functions import Product
from rank_collapse.watch.torch_tag_table import TagTable
from rank_collapse.watch.torch_tags import PAIR, Tag
from rank_collapse.watch.torch_weights import read_weights
from tests.oracles.measured_layers import (
    RIGHT,
    Attention,
    B,
    D,
    F,
    H,
    N,
    Stack,
    X,
    add_in_turn,
    check_layers,
    compute_entropy,
    compute_ratio,
    make_maps,
    nn,
    norm,
    pad,
    torch,
    watch_step,
)


def connect_by_matmul(self, x, mask):
    """Manifold-constrained hyper-connections of four streams."""
    streams = x[:, :, None].expand(-1, -1, 4, -1) * torch.arange(1, 5)[:, None]
    for i, attention in enumerate(self.attentions):
        flat = norm(streams.flatten(-2))
        before, after = self.before[i](flat).sigmoid(), self.after[i](flat).sigmoid()
        mixing = self.between[i](flat).unflatten(-1, (4, 4)).softmax(-1)
        y = attention(norm((before[:, :, None] @ streams)[:, :, 0]))
        streams = mixing @ streams + after[..., None] * y[:, :, None]
    return streams.sum(2)


def connect_by_einsum(self, x, mask):
    streams = torch.stack([x, 2 * x, 3 * x, 4 * x])
    for i, attention in enumerate(self.attentions):
        flat = streams.permute(1, 2, 0, 3).flatten(-2)
        y = attention(torch.einsum("bns,sbnd->bnd", self.before[i](norm(flat)).tanh(), streams))
        mixing = self.between[i](flat).unflatten(-1, (4, 4))
        streams = torch.einsum("bnst,tbnd->sbnd", mixing, streams) / 4
        streams = streams + torch.einsum("bns,bnd->sbnd", self.after[i](flat), y)
    return streams.mean(0)


def predict_and_correct(self, x, mask):
    """AltUp, as in Gemma 3n."""
    streams = torch.stack([x, 2 * x, -x, 0.5 * x])
    for i, attention in enumerate(self.attentions):
        mixing = self.small[i](streams[0]).tanh().unflatten(-1, (4, 4))
        predictions = (streams.permute(1, 2, 3, 0) @ mixing).permute(3, 0, 1, 2) + streams
        error = attention(norm(predictions[0])) - predictions[0]
        streams = predictions + 0.5 * error
    return streams[0]


def mix_experts(mix):
    def body(self, x, mask):
        for i, attention in enumerate(self.attentions):
            x = x + attention(norm(x))
            experts = torch.stack([expert(x).relu() for expert in self.experts], dim=2)
            x = x + mix(self.gates[i](x).sigmoid(), experts)
        return x

    return body


def convolve(self, x, mask):
    """A convolution whose kernel each token makes."""
    for i, attention in enumerate(self.attentions):
        windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
        x = x + (windows @ self.gates[i](x)[..., None]).squeeze(-1)
        x = x + attention(norm(x))
    return x


MIXTURES = {
    "hyper-connections, matmul": connect_by_matmul,
    "hyper-connections, einsum": connect_by_einsum,
    "AltUp": predict_and_correct,
    "experts, einsum": mix_experts(lambda g, e: torch.einsum("bne,bned->bnd", g, e)),
    "experts, matmul": mix_experts(lambda g, e: (g[:, :, None] @ e)[:, :, 0]),
    "experts, transposed": mix_experts(lambda g, e: (e.mT @ g[..., None])[..., 0]),
    "experts, bmm": mix_experts(
        lambda g, e: torch.bmm(g.flatten(0, 1)[:, None], e.flatten(0, 1)).view(B, N, D)
    ),
    "dynamic convolution": convolve,
}


@pytest.mark.parametrize("body", MIXTURES.values(), ids=MIXTURES)
def test_mixtures_of_a_token_are_no_attention(body):
    small, wide = make_maps(D, 3), make_maps(4 * D, 4)
    model = Stack(
        body,
        *(Attention() for _ in range(3)),
        before=wide,
        after=make_maps(4 * D, 4),
        between=make_maps(4 * D, 16),
        small=make_maps(D, 16),
        gates=small,
        experts=make_maps(D, D),
    )
    watched = check_layers(model)
    lines = watched.describe().splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [f"  {i} attentions.{i}" for i in range(3)]


def pool_vector(self, x, mask):
    """A mean by a softmax over tokens, which meets features again: no linear attention."""
    for attention in self.attentions:
        x = x + attention(norm(x))
    w = self.score(x[0])[:, 0].softmax(0)
    return torch.einsum("bnd,d->bn", x, torch.einsum("n,nd->d", w, x[0]))


def pool_and_compare(self, x, mask):
    for attention in self.attentions:
        x = x + attention(norm(x))
    pooled = (self.score(x).softmax(1).mT @ x)[:, 0]
    return F.normalize(pooled, dim=-1) @ F.normalize(self.other(x[:, 0]), dim=-1).T


@pytest.mark.parametrize("body", [pool_vector, pool_and_compare])
def test_a_mean_by_a_softmax_is_no_layer(body):
    torch.manual_seed(0)
    score, other = nn.Linear(D, 1), nn.Linear(D, D)
    watched = check_layers(Stack(body, Attention(), Attention(), score=score, other=other))
    reason = "no weights: its softmax is not taken over products of queries and keys"
    assert body is pool_vector or reason in watched.describe()


def test_a_soft_memory_of_parameters_is_no_attention():
    def body(self, x, mask):
        for attention in self.attentions:
            x = x + (x @ self.keys.T).softmax(-1) @ self.values
            x = x + attention(norm(x))
        return x

    memory = {name: nn.Parameter(torch.randn(5, D)) for name in ("keys", "values")}
    check_layers(Stack(body, Attention(), Attention(), **memory))


def attend_linearly(q, k, v, mask):
    return F.normalize(F.elu(q) + 1, dim=-1) @ ((F.elu(k) + 1).mT @ v) / N


def attend_by_differences(q, k, v, mask):
    """The form that was published: twice as many heads of queries as of values."""
    q, k = (a.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for a in (q, k))
    p = (q @ k.mT).softmax(-1).view(B, H, 2, N, N)
    return (p[:, :, 0] - 0.5 * p[:, :, 1]) @ v


def attend_efficiently(q, k, v, mask):
    """Linear attention with a softmax of keys over tokens, and one of queries over features."""
    return torch.einsum("bhnd,bhde->bhne", q.softmax(-1), k.softmax(-2).mT @ v)


def attend_to_gathered_values(q, k, v, mask):
    """Each query multiplies its three weights by copies of the values of its three keys."""
    weights, places = (q @ k.mT).topk(3, -1)
    chosen = v[:, :, None].expand(-1, -1, N, -1, -1)
    chosen = chosen.gather(3, places[..., None].expand(-1, -1, -1, -1, D // H))
    return (weights.softmax(-1)[..., None, :] @ chosen)[..., 0, :]


def attend_by_examples_and_heads(q, k, v, mask):
    """Products of single examples and heads, put together before they meet the values."""
    p = [(a @ b.T).softmax(-1) for a, b in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)]
    return torch.stack(p).unflatten(0, (B, H)) @ v


def attend_by_examples(q, k, v, mask):
    """One product for each example, put together before they meet the values."""
    p = [(a @ b.mT).softmax(-1) for a, b in zip(q, k, strict=True)]
    return torch.stack(p) @ v


NO_WEIGHTS = {
    "sigmoid": lambda q, k, v, mask: (q @ k.mT / 3 - 2).sigmoid() @ v,
    "squared relu": lambda q, k, v, mask: (q @ k.mT / 3).relu().square() / N @ v,
    "retention": lambda q, k, v, mask: (q @ k.mT / 9).tril() @ v,
    "cosines": lambda q, k, v, mask: F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT / N @ v,
    "differences": attend_by_differences,
    "linear": attend_linearly,
    "efficient": attend_efficiently,
    "gathered values": attend_to_gathered_values,
    "stacked products": attend_by_examples_and_heads,
    "stacked examples": attend_by_examples,
}


@pytest.mark.parametrize("attend", NO_WEIGHTS.values(), ids=NO_WEIGHTS)
def test_tokens_are_measured_where_weights_are_not(attend):
    torch.manual_seed(0)
    attentions = Attention(attend=attend), Attention(), Attention(attend=attend)
    model = Stack(add_in_turn, *attentions)
    row, watched = watch_step(model, X)
    expected = [compute_ratio(attention.kept[0]) for attention in attentions]
    assert row["residual_ratio"] == pytest.approx(expected, rel=1e-4), watched
    assert [value == value for value in row["attention_entropy"]] == [False, True, False]
    for part, names in (("query", "q"), ("key", "k"), ("value", "v")):
        grads = [getattr(a, names).weight.grad for a in attentions]
        biases = [getattr(a, names).bias.grad for a in attentions]
        norms = [
            torch.cat([g.flatten(), b]).norm().item() for g, b in zip(grads, biases, strict=True)
        ]
        assert row[f"{part}_gradient"] == pytest.approx(norms, rel=1e-4, abs=1e-8)
    assert watched.describe().count("no weights: ") == 2


class Single(Attention):
    """Attention of one example and one head, by matrices without further axes."""

    def __init__(self, multiply):
        super().__init__()
        self.multiply = multiply

    def forward(self, x, mask=None):
        q, k, v = (part(x[0]) for part in (self.q, self.k, self.v))
        p = (q @ k.T / 4).masked_fill(torch.ones(N, N).triu(1) > 0, -torch.inf).softmax(-1)
        self.kept = x.detach(), p.detach()[None, None]
        return self.o(self.multiply(F.dropout(p, 0.5), v))[None]


MATRIX_PRODUCTS = {
    "matmul": lambda p, v: p @ v,
    "mm": torch.mm,
    "linear": lambda p, v: F.linear(p, v.T),
    "addmm": lambda p, v: torch.addmm(torch.zeros(N, D), p, v),
    "method addmm": lambda p, v: torch.zeros(N, D).addmm(p, v),
    "convolution": lambda p, v: F.conv1d(p.T[None], v.T[..., None])[0].T,
    "einsum": lambda p, v: torch.einsum("nm,md->nd", p, v),
}


@pytest.mark.parametrize("multiply", MATRIX_PRODUCTS.values(), ids=MATRIX_PRODUCTS)
def test_weights_and_values_are_matrices_of_one_example(multiply):
    torch.manual_seed(0)
    check_layers(Stack(add_in_turn, Single(multiply), Single(multiply)), X[:1])


def test_padding_of_sigmoid_attention_does_not_count():
    torch.manual_seed(0)

    def attend(q, k, v, mask):
        return ((q @ k.mT).sigmoid() * mask[:, None, None]) @ v

    check_layers(Stack(add_in_turn, Attention(attend=attend)), pad(RIGHT), RIGHT, False)


BIAS = torch.where(torch.ones(9, 9).tril() > 0, 0.0, -torch.inf)
DOTS = {
    "by name": lambda dot, q, k, v: dot(value=v, key=k, query=q, attn_mask=BIAS, scale=0.5),
    "keys by name": lambda dot, q, k, v: dot(q, value=v, key=k, scale=0.5, is_causal=True),
    "in order": lambda dot, q, k, v: dot(q, k, v, None, 0.0, True, scale=0.5),
    "in groups": lambda dot, q, k, v: dot(q, k, v, is_causal=True, scale=0.5, enable_gqa=True),
}


@pytest.mark.parametrize("name", DOTS)
def test_arguments_of_the_product_of_torch_have_names_or_an_order(name):
    kept = []

    def attend(q, k, v, mask):
        is_grouped = name == "in groups"  # four heads of queries, two of keys
        if is_grouped:
            q, k, v = (a.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for a in (q, k, v))
            k, v = k[:, :2], v[:, :2]
        keys = k.repeat_interleave(2, 1) if is_grouped else k
        kept.append((0.5 * q @ keys.mT + BIAS).softmax(-1).detach())
        y = DOTS[name](F.scaled_dot_product_attention, q, k, v)
        return y.unflatten(1, (2, 2)).transpose(2, 3).flatten(-2) if is_grouped else y

    model = Stack(add_in_turn, Attention(attend=attend))
    row, watched = watch_step(model, X)
    (layer,) = model.attentions
    assert row["residual_ratio"] == pytest.approx([compute_ratio(layer.kept[0])], 1e-4), watched
    assert row["attention_entropy"] == pytest.approx([compute_entropy(kept[0])], 1e-4)
    for part, linear in (("query", layer.q), ("key", layer.k), ("value", layer.v)):
        norm = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], dim=1).norm().item()
        assert row[f"{part}_gradient"] == pytest.approx([norm], rel=1e-4, abs=1e-8)


def multiply_twice(q, k, v, mask):
    return ((q @ k.mT).softmax(-1) @ (k @ q.mT).softmax(-1)) @ v


LEFT_OUT = {
    "two weights": (multiply_twice, "several products of queries and keys are multiplied", False),
    "two products": (
        lambda q, k, v, mask: (q @ k.mT) @ (q @ k.mT).mT @ v / 9,
        "several products of queries and keys are multiplied",
        False,
    ),
    "exponentials": (
        lambda q, k, v, mask: (q @ k.mT / 3).exp() @ v,
        "its weights are not a distribution over keys",
        True,
    ),
    "sorted": (
        lambda q, k, v, mask: (q @ k.mT / 3).exp().sort(-1).values @ v,
        "its weights are not a distribution over keys",
        False,
    ),
    "another key": (
        lambda q, k, v, mask: F.pad(q @ k.mT / 3, (0, 1)).softmax(-1) @ F.pad(v, (0, 0, 0, 1)),
        "weights of 9 × 10 for 9 queries and 9 keys",
        True,
    ),
    "one head of queries": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q[:, :1], k, v),
        "6 matrices of weights for 3 of queries",
        True,
    ),
    "summed heads": (
        lambda q, k, v, mask: torch.einsum("bhnm,bhmd->bnd", (q @ k.mT).softmax(-1), v)[
            :, None
        ].expand(v.shape),
        "weights of 2 × 9 for 9 queries and 9 keys",
        True,
    ),
    "features": (
        lambda q, k, v, mask: ((q.mT @ k / 9).exp() @ v.mT).mT,
        "its softmax is not taken over the keys of tokens",
        False,
    ),
}


@pytest.mark.parametrize(("attend", "reason", "has_tokens"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_products_that_are_no_weights_of_attention_are_left_out(attend, reason, has_tokens):
    """Tokens and gradients are measured where a product of queries and keys is known."""
    row, watched = watch_step(Stack(add_in_turn, Attention(attend=attend)), X)
    assert f"no weights: {reason}" in watched.describe()
    assert not any("entropy" in name for name in row)
    for name in ("residual_ratio", "query_gradient"):
        assert (name in row) == has_tokens, row


@pytest.mark.parametrize("tokens", ["read", "raw"])
def test_a_softmax_over_one_key_is_left_out(tokens):
    row, watched = watch_step(Stack(add_in_turn, Attention()), X[:, :1], tokens=tokens)
    assert "no weights: 3 examples of 1 key" in watched.describe()
    assert not any("entropy" in name or "ratio" in name for name in row)


def test_queries_are_the_axes_that_values_lack_and_along_which_pairs_change():
    """Heads that share values are no queries; where no pair is known, the last axis has them."""
    p = torch.rand(2, 3, 5, 7).softmax(-1)  # [b, h, n, m]
    pairs = (torch.arange(5)[:, None] * PAIR + torch.arange(7)).expand(2, 3, 5, 7)
    table, values = TagTable([]), torch.rand(2, 7, 4)

    def read(weights, letters, **followers):
        table.record(weights, Tag(followers={n: lambda a=a: a for n, a in followers.items()}))
        return read_weights(table, Product(weights, values, letters))

    for followers in ({}, {"pairs": pairs}, {"pairs": torch.full_like(pairs, -1)}):
        weights = read(p, ("bhnm", "bmd", "bhnd"), **followers)
        assert torch.equal(weights.p, p.flatten(0, 1)) and weights.rows.tolist() == [*range(5)]
    turned = p.transpose(1, 2)
    weights = read(turned, ("bnhm", "bmd", "bnhd"), pairs=pairs.transpose(1, 2))
    assert torch.equal(weights.p, p.flatten(0, 1))
    flat = read(p.transpose(1, 2), ("bnhm", "bmd", "bnhd"))  # the last axis is taken for queries
    assert torch.equal(flat.p, turned.flatten(0, 1))
    heads_first = read(p.transpose(0, 1), ("hbnm", "bmd", "bhnd"))
    assert torch.equal(heads_first.p, p.transpose(0, 1).flatten(0, 1))
