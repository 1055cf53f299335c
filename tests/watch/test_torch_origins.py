"""Which products are attention, which tokens its keys are of, and what needs no weights."""

import pytest

pytest.importorskip("torch")

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
    compute_ratio,
    heads,
    join,
    nn,
    norm,
    pad,
    torch,
    watch_step,
)


def make_maps(*sizes, count=3):
    torch.manual_seed(0)
    return [nn.Linear(*sizes) for _ in range(count)]


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
    check_layers(Stack(body, Attention(), Attention(), score=score, other=other))


def test_a_soft_memory_of_parameters_is_no_attention():
    def body(self, x, mask):
        for attention in self.attentions:
            x = x + (x @ self.keys.T).softmax(-1) @ self.values
            x = x + attention(norm(x))
        return x

    memory = {name: nn.Parameter(torch.randn(5, D)) for name in ("keys", "values")}
    check_layers(Stack(body, Attention(), Attention(), **memory))


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


def test_padding_of_sigmoid_attention_does_not_count():
    torch.manual_seed(0)

    def attend(q, k, v, mask):
        return ((q @ k.mT).sigmoid() * mask[:, None, None]) @ v

    check_layers(Stack(add_in_turn, Attention(attend=attend)), pad(RIGHT), RIGHT, False)


class Made(Attention):
    """Its weights are computed from parameters and buffers in each pass."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.register_buffer("u", torch.randn(D))
        self.a, self.b = (nn.Parameter(torch.randn(*s) / 4) for s in ((D, 2), (2, D)))

    def forward(self, x, mask=None):
        q, k, v = (x @ self.make(self, part.weight).T for part in (self.q, self.k, self.v))
        p = (q @ k.mT / 4).softmax(-1)
        self.kept = x.detach(), p.detach()[:, None]
        return p @ v


def divide_by_norm(self, weight):
    """Divides a weight by an estimate of its spectral norm, as in σReparam."""
    v = F.normalize(weight.T @ self.u, dim=0)
    return weight / (F.normalize(weight @ v, dim=0) @ weight @ v)


MADE = {
    "spectral norm": divide_by_norm,
    "standardised": lambda self, weight: (weight - weight.mean(0)) / weight.std(0) / 4,
    "merged LoRA": lambda self, weight: weight + self.a @ self.b,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_weights_that_are_computed_are_maps(make):
    torch.manual_seed(0)
    check_layers(Stack(add_in_turn, Made(make), Made(make)))


class Absorbed(Attention):
    """Latent attention whose keys are not expanded, with a part of its own for positions."""

    def __init__(self):
        super().__init__()
        self.small, self.turned = nn.Linear(D, 6), nn.Linear(D, 4)
        self.up = nn.Parameter(torch.randn(H, 12, 6) / 3)

    def forward(self, x, mask=None):
        q = heads(self.q(x))
        latent, turned = self.small(x)[:, None], self.turned(x)[:, None]
        scores = torch.einsum("bhnd,hdc->bhnc", q, self.up[:, :8]) @ latent.mT
        p = ((scores + q[..., :4] @ turned.mT) / 4).softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ latent @ self.up[:, :8].mT))


def test_absorbed_latent_attention():
    torch.manual_seed(0)
    check_layers(Stack(add_in_turn, Absorbed(), Absorbed()))


class Written(Attention):
    """Queries and keys are written into buffers, by indices and into views."""

    def forward(self, x, mask=None):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        all_q, all_k = torch.empty(B, H, N, D // H), x.new_zeros(B, H, N, D // H)
        all_q[:, 0], all_q[:, 1] = q[:, 0], q[:, 1]
        all_k[..., :3] = k[..., :3]
        all_k[..., 3:].copy_(k[..., 3:])
        p = (all_q @ all_k.mT / 3).softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ v))


class Turned(Attention):
    """Scores are of keys by queries, and the softmax is over the second last axis."""

    def forward(self, x, mask=None):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        p = (k @ q.mT / 3).softmax(-2)
        self.kept = x.detach(), p.detach().mT
        return self.o(join(p.mT @ v))


class Ordered(Attention):
    """Scores and weights are [m, b, h, n], by equations whose first factor are keys or values."""

    def forward(self, x, mask=None):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        p = (torch.einsum("bhmd,bhnd->mbhn", k, q) / 3).softmax(0)
        self.kept = x.detach(), p.detach().permute(1, 2, 3, 0)
        return self.o(join(torch.einsum("bhmd,mbhn->bhnd", v, p)))


class Shared(Attention):
    """Heads share keys and values, and stand behind the queries in scores."""

    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(D, D // H), nn.Linear(D, D // H)

    def forward(self, x, mask=None):
        q, k, v = heads(self.q(x)), self.k(x), self.v(x)
        p = (torch.einsum("bhnd,bmd->bnhm", q, k) / 3).softmax(-1)
        self.kept = x.detach(), p.detach().transpose(1, 2)
        return self.o(join(torch.einsum("bnhm,bmd->bhnd", p, v)))


class Grouped(Shared):
    """The same with a group of heads, keys as first factors, and heads behind both."""

    def forward(self, x, mask=None):
        q, k, v = heads(self.q(x))[:, None], self.k(x)[:, None], self.v(x)[:, None]
        p = (torch.einsum("bgmd,bghnd->bmhng", k, q) / 3).softmax(1)
        self.kept = x.detach(), p.detach()[..., 0].permute(0, 2, 3, 1)
        return self.o(join(torch.einsum("bmhng,bgmd->bghnd", p, v)[:, 0]))


class Broadcast(Shared):
    """The same by products of matrices, in which keys of one head meet all queries."""

    def forward(self, x, mask=None):
        q, k, v = self.q(x).unflatten(-1, (H, -1)), self.k(x)[:, None], self.v(x)[:, None]
        p = (q @ k.mT / 3).softmax(-1)
        self.kept = x.detach(), p.detach().transpose(1, 2)
        return self.o((p @ v).flatten(-2))


class Flat(Shared):
    """Heads are further queries, as in GPT-BigCode."""

    def forward(self, x, mask=None):
        q = self.q(x).unflatten(-1, (H, -1)).flatten(1, 2)
        p = (q @ self.k(x).mT / 3).softmax(-1)
        self.kept = x.detach(), p.detach().unflatten(1, (N, H)).transpose(1, 2)
        return self.o((p @ self.v(x)).unflatten(1, (N, H)).flatten(-2))


class Convolved(Attention):
    """Queries go through a short convolution, after which their tokens are not known."""

    def __init__(self):
        super().__init__()
        self.short = nn.Conv1d(D, D, 3, groups=D, bias=False)

    def forward(self, x, mask=None):
        q = heads(self.short(F.pad(self.q(x).mT, (2, 0))).mT)
        p = (q @ heads(self.k(x)).mT / 3).softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ heads(self.v(x))))


class Unmapped(Attention):
    """Queries are the tokens themselves."""

    def forward(self, x, mask=None):
        p = (x @ self.k(x).mT / 4).softmax(-1)
        self.kept = x.detach(), p.detach()[:, None]
        return p @ self.v(x)


class Normed(Attention):
    """Queries and keys have norms of their own."""

    def forward(self, x, mask=None):
        y = F.layer_norm(x, (D,))
        q, k, v = heads(self.q(y)), heads(self.k(norm(x))), heads(self.v(x))
        p = (q @ k.mT / 3).softmax(-1)
        self.kept = y.detach(), p.detach()
        return self.o(join(p @ v))


def add_with_mlp(self, x, mask):
    """Attention and multilayer perceptron without a module that ends in between."""
    for attention in self.attentions:
        x = x + type(attention).forward(attention, x)
        x = x + self.mlp(x).relu()
    return x


@pytest.mark.parametrize(
    "kind",
    [Written, Turned, Ordered, Shared, Grouped, Broadcast, Flat, Convolved, Unmapped, Normed],
)
@pytest.mark.parametrize("body", [add_in_turn, add_with_mlp])
def test_tokens_of_unusual_queries_and_keys(kind, body):
    if kind is Unmapped and body is add_with_mlp:
        pytest.skip("queries then have another map, that of the layer before")
    torch.manual_seed(0)
    check_layers(Stack(body, kind(), kind(), mlp=nn.Linear(D, D)))


class Residual(Attention):
    """Scores of the earlier layer are added to its own, as in RealFormer."""

    def forward(self, x, earlier):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        scores = earlier + q @ k.mT / 3
        p = scores.softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ v)), scores


def add_scores(self, x, mask):
    scores = 0.0
    for attention in self.attentions:
        y, scores = attention(norm(x), scores)
        x = x + y
    return x


def add_scores_inline(self, x, mask):
    """The same without a module that ends in between."""
    scores = 0.0
    for attention in self.attentions:
        y, scores = type(attention).forward(attention, norm(x), scores)
        x = x + y
    return x


@pytest.mark.parametrize("body", [add_scores, add_scores_inline])
def test_scores_of_an_earlier_layer_have_no_say_in_tokens(body):
    torch.manual_seed(0)
    check_layers(Stack(body, *(Residual() for _ in range(3))))
