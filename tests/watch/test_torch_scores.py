"""Scores of an earlier layer have no say in the tokens of a layer."""

import pytest

pytest.importorskip("torch")

from tests.oracles.measured_layers import (
    Attention,
    B,
    D,
    Stack,
    X,
    check_layers,
    compute_entropy,
    heads,
    join,
    norm,
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
