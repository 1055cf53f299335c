"""Scores of an earlier layer have no say in the tokens of a layer."""

import pytest

pytest.importorskip("torch")

from tests.oracles.measured_layers import (
    Attention,
    Stack,
    check_layers,
    heads,
    join,
    norm,
    torch,
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
