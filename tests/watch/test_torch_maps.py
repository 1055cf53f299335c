"""Linear maps behind queries and keys: weights that are computed, latents, unusual products."""

import pytest

pytest.importorskip("torch")
from rank_collapse.watch.torch_functions import Product
from rank_collapse.watch.torch_maps import _read_parameters, see_map
from rank_collapse.watch.torch_tag_table import TagTable
from rank_collapse.watch.torch_tags import Tag
from tests.oracles.measured_layers import (
    Attention,
    B,
    D,
    F,
    H,
    N,
    Stack,
    add_in_turn,
    check_layers,
    heads,
    join,
    nn,
    norm,
    torch,
)


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
    "in another order": lambda self, weight: weight.index_select(0, torch.arange(D).flip(0)),
    "by an index": lambda self, weight: weight[torch.arange(D).flip(0)],
    "pruned": lambda self, weight: weight.masked_fill(torch.eye(D) > 0, 0.0),
    "rounded": lambda self, weight: weight + ((4 * weight).round() / 4 - weight).detach(),
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


class TurnedFewer(Attention):
    """The same with fewer keys than queries: every second token."""

    def forward(self, x, mask=None):
        q, (k, v) = heads(self.q(x)), (heads(part(x[:, ::2])) for part in (self.k, self.v))
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


class Extended(Attention):
    """Queries and keys have a feature before the others that no map made."""

    def forward(self, x, mask=None):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        q, k = (torch.cat([torch.ones(B, H, N, 1), a], dim=-1) for a in (q, k))
        p = (q @ k.mT / 3).softmax(-1)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ v))


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
    [
        Written,
        Turned,
        TurnedFewer,
        Ordered,
        Shared,
        Grouped,
        Broadcast,
        Flat,
        Convolved,
        Extended,
        Unmapped,
        Normed,
    ],
)
@pytest.mark.parametrize("body", [add_in_turn, add_with_mlp])
def test_tokens_of_unusual_queries_and_keys(kind, body):
    if kind in (Unmapped, TurnedFewer) and body is add_with_mlp:
        pytest.skip("the tokens are then those behind the map of the layer before")
    torch.manual_seed(0)
    check_layers(Stack(body, kind(), kind(), mlp=nn.Linear(D, D)))


def test_a_tensor_that_maps_read_along_other_axes_is_a_source_for_each():
    """Features are the last axis for one map, and the middle one for another."""
    table, weight, x = TagTable([]), nn.Parameter(torch.ones(5, 4)), torch.rand(2, 3, 4)
    maps = []
    for letters, shape in ((("aby", "zy", "abz"), (2, 3, 5)), (("ayb", "zy", "azb"), (2, 5, 4))):
        output = torch.zeros(shape)
        see_map(table, Product(x, weight, letters), [weight], output)
        (linear_map,) = table.tag(output).maps
        maps.append((linear_map, table.number(output, "entries")))
    (first, numbers), (second, others) = maps
    assert torch.equal(first.source.matrix, x.reshape(6, 4))
    assert torch.equal(second.source.matrix, x.mT.reshape(8, 3))
    rows = torch.arange(8).reshape(2, 1, 4)
    assert torch.equal(first.find_rows(numbers), torch.arange(6).reshape(2, 3, 1).expand(2, 3, 5))
    assert torch.equal(second.find_rows(others), rows.expand(2, 5, 4))
    assert (first.find_rows(others) == -1).all() and (second.find_rows(numbers) == -1).all()


def test_a_map_has_the_axis_of_its_outputs_if_there_is_one():
    """An equation may give the features of all heads at once, along two axes."""
    x = torch.rand(2, 3, 4)
    for letters, shape, axis in (
        (("abk", "zk", "abz"), (5, 4), 0),
        (("abk", "kz", "abz"), (4, 5), 1),
        (("abk", "kzy", "abzy"), (4, 5, 6), -1),
        (("abk", "k", "ab"), (4,), 0),
    ):
        table, weight = TagTable([]), nn.Parameter(torch.rand(shape))
        output = torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", x, weight.detach())
        see_map(table, Product(x, weight, letters), [weight], output)
        (linear_map,) = table.tag(output).maps
        assert linear_map.parameters == ((weight, axis, 0),)
        assert (linear_map.count, linear_map.width) == (output.numel(), output[0, 0].numel())


def test_which_parameter_a_weight_is_made_of():
    """By the part of it that a view has, where the view has whole outputs."""
    table = TagTable([])
    matrix, other = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))
    biases = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    unknown = [(None, -1, 0)]

    def read(tensor, *parameters, axis=0, **options):
        if parameters:
            table.record(tensor, Tag(is_constant=True, parameters=parameters, **options))
        return _read_parameters(table, tensor, axis)

    assert read(matrix, axis=1) == [(matrix, 1, 0)] and read(biases[0], axis=1)[0][1] == 0
    assert read(torch.ones(6, 4)) == unknown  # such as of the content
    table.record(buffer := torch.ones(6, 4), Tag(is_constant=True))
    assert read(buffer) == []
    table.record(content := torch.ones(6, 4), Tag(is_content=True))
    assert read(content) == unknown
    assert read(matrix[2:4], matrix) == [(matrix, 0, 2)]
    assert read(matrix[2:4], matrix, axis=1) == unknown
    for part in (matrix[2:4].view(4, 2), matrix[:, 1:3], matrix[2:4].clone(), matrix[2:4].T):
        assert read(part, matrix) == unknown
    assert read(matrix.T, matrix) == [(matrix, -1, 0)]
    low = nn.Parameter(torch.ones(6, 2))
    assert read(torch.ones(6, 4), low, matrix) == [(low, -1, 0), (matrix, -1, 0)]
    assert read(torch.ones(12, 4), matrix, other) == unknown
    joint = torch.cat(biases)
    table.record(joint, Tag(is_constant=True, parameters=biases, joined=biases))
    assert read(joint[6:], *biases) == [(biases[1], 0, 0)]
    assert read(joint[:6], *biases) == [(biases[0], 0, 0)]
    assert read(joint[6:10], *biases) == read(joint[5:11], *biases) == unknown
    assert read(joint[::2], *biases) == unknown
