"""Masks and causal weights of products of queries and keys."""

import pytest

pytest.importorskip("torch")

from rank_collapse.watch.torch_products import compute_dot_weights, is_allowed as allowed
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
