"""Scores of an earlier layer have no say in the tokens of a layer."""

import pytest

pytest.importorskip("torch")

from rank_collapse.watch.torch_functions import MAPS, SOFTMAX, Product, read_product
from rank_collapse.watch.torch_origins import Origins
from rank_collapse.watch.torch_scores import _mixes_heads
from rank_collapse.watch.torch_tags import Tag, Term
from tests.oracles.measured_layers import (
    RIGHT,
    Attention,
    B,
    D,
    H,
    N,
    Stack,
    X,
    check_layers,
    compute_entropy,
    compute_ratio,
    heads,
    join,
    nn,
    norm,
    pad,
    torch,
    watch_step,
)


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


class Across(Attention):
    """The same, with keys and values of other tokens; it keeps the weights of each run."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x, others, earlier):
        q, k, v = heads(self.q(x)), heads(self.k(others)), heads(self.v(others))
        scores = earlier + q @ k.mT / 3
        p = scores.softmax(-1)
        self.kept.append(p.detach())
        return self.o(join(p @ v)), scores


def add_scores_across(self, x, others):
    scores = 0.0
    for attention in self.attentions:
        y, scores = attention(norm(x), others, scores)
        x = x + y
    return x


@pytest.mark.parametrize("is_looped", [False, True])
def test_of_scores_across_tokens_those_of_an_earlier_layer_have_no_say(is_looped):
    """Nor where one attention runs again; gradients are those of the layer's own parameters."""
    torch.manual_seed(0)
    layers = [Across() for _ in range(1 if is_looped else 3)]
    model = Stack(add_scores_across, *layers * (3 if is_looped else 1))
    row, watched = watch_step(model, X, torch.randn(B, 5, D))
    entropies = [compute_entropy(p) for layer in layers for p in layer.kept]
    assert row["cross.attention_entropy"] == pytest.approx(entropies, 1e-4), watched.describe()
    for part, name in (("q", "query"), ("k", "key"), ("v", "value")):
        maps = [getattr(layer, part) for layer in layers]
        norms = [torch.cat([m.weight.grad, m.bias.grad[:, None]], 1).norm().item() for m in maps]
        measured = [v for v in row[f"cross.{name}_gradient"] if v == v]
        assert measured == pytest.approx(norms, 1e-4), watched.describe()


def test_one_query_of_each_example_attends_to_other_tokens():
    """Along its axis the entries come from one token, and yet they are no features."""

    def body(self, x, others):
        (across,) = self.attentions
        return across(x, kv=(heads(across.k(others)), heads(across.v(others))))

    model = Stack(body, Attention())
    row, watched = watch_step(model, X[:, :1], torch.rand(B, 5, D))
    expected = compute_entropy(model.attentions[0].kept[1])
    assert row["cross.attention_entropy"] == pytest.approx([expected], 1e-4), watched.describe()


def call(origins, function, *args):
    """Calls a function of torch, and records where its result comes from."""
    result = function(*args)
    product = read_product(function, args, {}) if function in MAPS else None
    origins.see_function(function, product, args, {}, result)
    return result


def test_of_two_constants_matrices_make_a_weight_and_a_batch_of_latents_is_mapped():
    origins = Origins([])
    first, second, weight = (nn.Parameter(torch.rand(*s)) for s in ((4, 2), (2, 5), (4, 5)))
    product = origins.tag(call(origins, torch.matmul, first, second))
    assert product.is_constant and product.parameters == (first, second) and not product.maps
    latents = nn.Parameter(torch.rand(1, 3, 4))
    tag = origins.tag(call(origins, torch.matmul, latents, weight))
    (linear_map,) = tag.maps
    assert not tag.is_constant and linear_map.parameters == ((weight, 1, 0),)
    assert torch.equal(linear_map.source.matrix, latents[0])


class Mixed(Attention):
    """Talking heads: a matrix mixes the scores of heads, another one their weights."""

    def __init__(self, mix):
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.eye(2) + 0.1) for _ in range(2))
        self.mix = mix

    def forward(self, x, mask=None):
        q, k, v = (heads(part(x)) for part in (self.q, self.k, self.v))
        p = self.mix(self.mix(q @ k.mT / 3, self.before).softmax(-1), self.after / 1.2)
        self.kept = x.detach(), p.detach()
        return self.o(join(p @ v))


MIXES = {
    "einsum": lambda a, matrix: torch.einsum("bhnm,hg->bgnm", a, matrix),
    "linear": lambda a, matrix: torch.nn.functional.linear(a.permute(0, 2, 3, 1), matrix.T).permute(
        0, 3, 1, 2
    ),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_heads_of_scores_and_of_weights_are_mixed(mix):
    """The weights are those that meet the values; tokens and gradients are as without mixing."""
    torch.manual_seed(0)
    model = Stack(add_scores_alone, Mixed(mix), Mixed(mix))
    check_layers(model)


def add_scores_alone(self, x, mask):
    for attention in self.attentions:
        x = x + attention(norm(x))
    return x


MASKED_PRODUCTS = {
    "function": lambda bias, q, k: torch.baddbmm(bias, q, k, alpha=0.3),
    "method": lambda bias, q, k: bias.baddbmm(q, k, alpha=0.3),
    "by name": lambda bias, q, k: torch.baddbmm(bias, q, batch2=k, alpha=0.3),
}


@pytest.mark.parametrize("multiply", MASKED_PRODUCTS.values(), ids=MASKED_PRODUCTS)
def test_a_mask_to_which_a_product_is_added_hides_its_keys(multiply):
    kept, bias = [], torch.where(RIGHT[:, None, None] > 0, 0.0, -1e9).expand(B, H, N, N)

    def attend(q, k, v, mask):
        scores = multiply(bias.flatten(0, 1), q.flatten(0, 1), k.mT.flatten(0, 1))
        kept.append(scores.softmax(-1))
        return (kept[0] @ v.flatten(0, 1)).unflatten(0, (B, H))

    model = Stack(lambda self, x, mask: self.attentions[0](x), Attention(attend=attend))
    row, watched = watch_step(model, pad(RIGHT))
    ratio = compute_ratio(pad(RIGHT), RIGHT)
    assert row["residual_ratio"] == pytest.approx([ratio], 1e-4), watched
    entropy = compute_entropy(kept[0].detach().unflatten(0, (B, H)), RIGHT)
    assert row["attention_entropy"] == pytest.approx([entropy], 1e-4)


def test_parameters_that_meet_scores_are_no_masks_and_other_tensors_may_be():
    origins = Origins([])
    x, weight = torch.rand(2, 3, 4), nn.Parameter(torch.rand(4, 4))
    q, k = (call(origins, torch.nn.functional.linear, x, weight) for _ in range(2))
    scores = call(origins, torch.matmul, q, call(origins, torch.Tensor.mT.__get__, k))
    learned, plain = nn.Parameter(torch.ones(3)), torch.ones(3)
    for bounds, is_unread in (
        ([learned], False),
        ([plain], True),
        ([plain, learned], True),
        ([learned, plain, learned], True),
    ):
        result = scores
        for bound in bounds:
            result = call(origins, torch.minimum, result, bound)
        assert origins.tag(result).is_unread == is_unread


def test_where_pairs_are_unknown_a_product_of_scores_and_a_constant_mixes_heads():
    """Unless it is a linear map of features, `linear`."""
    origins = Origins([])
    x, weight = torch.rand(2, 3, 4), nn.Parameter(torch.rand(4, 4))
    product = Product(x, weight, ("bnm", "mg", "bng"))
    term = Term(("bnd", "bmd", "bnm"), {}, Tag(), Tag())
    for terms in ((), (term,)):
        origins.record(x, Tag(terms=terms))
        assert _mixes_heads(origins, torch.matmul, product) == bool(terms)
        assert not _mixes_heads(origins, torch.nn.functional.linear, product)


def test_weights_are_followed_by_pairs_masks_and_the_softmax_alone():
    """A bias that tokens decide brings numbers of entries to the scores."""
    origins = Origins([])
    x, weight = torch.rand(2, 3, 4), nn.Parameter(torch.rand(3, 4))
    q, k = (call(origins, torch.nn.functional.linear, x, weight) for _ in range(2))
    scores = call(origins, torch.matmul, q, call(origins, torch.Tensor.mT.__get__, k))
    scores = call(origins, torch.add, scores, q)
    assert origins.tag(scores).followers.keys() == {"pairs", "entries"}
    for function in sorted(SOFTMAX, key=str):
        p = call(origins, function, scores, -1)
        assert origins.tag(p).followers.keys() == {"pairs", "softmax"}
