"""Pieces of one attention: a product for each document, chunks of queries."""

import copy
import itertools
import math

import numpy as np
import pytest

pytest.importorskip("torch")
import rank_collapse as rc
from rank_collapse.torch import watch
from rank_collapse.watch.torch_pieces import Piece, join_documents
from rank_collapse.watch.torch_tokens import Tokens
from tests.oracles.torch_models import torch
from tests.oracles.watched_stack import D, F, N, X, measure_row, nn, ratio

PIECES = (
    slice(0, N),
    slice(N, N + 3),
    slice(N + 3, N + 4),
    slice(N + 4, N + 4),
    slice(N + 4, 2 * N),
)


class Pieces(nn.Module):
    """Computes a product for each document of [n, d], or for each chunk of the queries."""

    def __init__(self, keys, is_fused=True):
        super().__init__()
        torch.manual_seed(0)
        sizes = [3 * D] if is_fused else [D, D, D]
        self.keys, self.maps = keys, nn.ModuleList(nn.Linear(D, size) for size in sizes)

    def project(self, x):
        """Computes queries, keys and values [h, n, k]."""
        projections = [linear_map(x) for linear_map in self.maps]
        projections = projections if len(projections) == 3 else projections[0].chunk(3, -1)
        return [a.unflatten(-1, (2, -1)).transpose(0, 1) for a in projections]

    def forward(self, x):
        q, k, v = (a[None] for a in self.project(x.flatten(0, 1)))
        products = []
        for piece in PIECES:
            keys = {"own": piece, "all": slice(None), "causal": slice(piece.stop)}[self.keys]
            parts = q[:, :, piece], k[:, :, keys], v[:, :, keys]
            products.append(F.scaled_dot_product_attention(*parts))
        return torch.cat(products, dim=2)[0].transpose(0, 1).reshape(x.shape)


def compute_gradient_norms(model):
    """Computes the gradient norms of the queries, keys and values of `Pieces`."""
    gradients = [torch.cat([f.weight.grad, f.bias.grad[:, None]], dim=1) for f in model.maps]
    return [part.norm().item() for part in torch.cat(gradients).chunk(3)]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("tokens", ["read", "raw", "unit"])
def test_a_product_for_each_document(tokens, is_fused):
    """One document has a single token, and one has none."""
    model = nn.Sequential(Pieces("own", is_fused), nn.Linear(D, D))
    row = measure_row(model, X, tokens=tokens)
    x, documents = X.flatten(0, 1), [piece for piece in PIECES if piece.stop > piece.start]
    q, k, _ = (a.detach() for a in model[0].project(x))
    entropies = []
    for piece in documents:
        p = (q[:, piece] @ k[:, piece].mT / math.sqrt(D // 2)).softmax(-1)
        entropies.append(-(p * p.log()).sum(-1).mean(-1))
    heads = torch.stack(entropies).mean(dim=0)
    assert row["attention_entropy"] == pytest.approx([heads.mean().item()], 1e-4)
    assert row["attention_entropy_least"] == pytest.approx([heads.min().item()], 1e-4)
    states = x if tokens == "read" else model[0](X).detach().flatten(0, 1)
    numbers = [i for i, piece in enumerate(documents) for _ in x[piece]]
    kind = "unit" if tokens == "unit" else "raw"
    for name, value in rc.monitor(states.numpy(), segments=np.array(numbers), tokens=kind).items():
        assert row[name] == pytest.approx([float(value)], 1e-4), name
    norms = [row[f"{part}_gradient"][0] for part in ("query", "key", "value")]
    assert norms == pytest.approx(compute_gradient_norms(model[0]), 1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_images_of_qwen2_vl_are_documents(implementation):
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    torch.manual_seed(0)
    sizes = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    config = qwen.Qwen2VLVisionConfig(**sizes, temporal_patch_size=1)
    model = qwen.Qwen2VisionTransformerPretrainedModel._from_config(
        config, attn_implementation=implementation
    ).train()
    grids = torch.tensor([[1, 4, 4], [1, 2, 4], [2, 2, 2]])  # images, the third in two frames
    ends = [0, 16, 24, 28, 32]
    reads, entropies = [], []

    def keep(attention, args, kwargs):
        reads.append(args[0].detach())
        q, k, _ = attention.qkv(args[0]).reshape(len(args[0]), 3, 2, -1).unbind(1)
        q, k = qwen.apply_rotary_pos_emb_vision(q, k, *kwargs["position_embeddings"])
        scores = (q.transpose(0, 1) @ k.permute(1, 2, 0) / math.sqrt(D // 2)).detach()
        weights = [scores[:, a:b, a:b].softmax(-1) for a, b in itertools.pairwise(ends)]
        image_entropies = [-(p * p.log()).sum(-1).mean() for p in weights]
        entropies.append(np.mean(image_entropies))

    copied = copy.deepcopy(model)
    for block in copied.blocks:
        block.attn.register_forward_pre_hook(keep, with_kwargs=True)
    pixels = torch.randn(ends[-1], 3 * 4 * 4, generator=torch.Generator().manual_seed(0))
    copied(pixels, grids)
    watched = watch(model, 1)
    model(pixels, grids).last_hidden_state.square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    (row,) = watched.rows
    ratios = [ratio(*(x[a:b] for a, b in itertools.pairwise(ends))) for x in reads]
    assert row["residual_ratio"] == pytest.approx(ratios, 1e-4)
    assert row["attention_entropy"] == pytest.approx(entropies, 1e-4)


@pytest.mark.parametrize("tokens", ["read", "raw"])
@pytest.mark.parametrize("keys", ["all", "causal"])
def test_chunks_of_queries_are_left_out(keys, tokens):
    """The first causal chunk has the keys of its own tokens alone, as a document has."""
    model = nn.Sequential(Pieces(keys), nn.Linear(D, D))
    watched = watch(model, 1, tokens=tokens)
    model(X).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert "no tokens: its products have different tokens" in watched.describe()
    assert "no weights: 4 products of queries and keys in one run" in watched.describe()
    (row,) = watched.rows
    assert not any("ratio" in name or "entropy" in name for name in row)
    norms = [row[f"{part}_gradient"][0] for part in ("query", "key", "value")]
    assert norms == pytest.approx(compute_gradient_norms(model[0]), 1e-4)


def make_piece(index, **scalars):
    """Makes a piece of one document, numbered by its first token, with scalars by head."""
    index = torch.tensor([index])
    tokens = Tokens(torch.zeros(8, 2), index, index, torch.zeros(1), False, ())
    scalars = {name: torch.tensor([values]) for name, values in scalars.items()}
    return Piece(3, tokens, index[:, :1].expand_as(index), index.numel(), scalars)


def test_documents_are_joined_in_the_order_of_their_tokens():
    """Whichever was computed first; mass that no key has is 0 where there is none."""
    later = make_piece([4, 5], attention_entropy=[1.0, 2.0], missing_mass=[0.5, 0.25])
    first = make_piece([0, 1, 2], attention_entropy=[3.0, 4.0])
    (joined,) = join_documents([later, first])
    assert joined.tokens.index.tolist() == [[0, 1, 2, 4, 5]]
    assert joined.documents.tolist() == [[0, 0, 0, 4, 4]]
    assert (joined.frame, joined.num_keys) == (3, 3)
    assert {name: a.tolist() for name, a in joined.scalars.items()} == {
        "attention_entropy": [[1, 2], [3, 4]],
        "missing_mass": [[0.5, 0.25], [0, 0]],
    }
    twice = make_piece([2, 3])  # a token of two documents
    for pieces in ([first, twice], [twice, first]):
        assert all(a is b for a, b in zip(join_documents(pieces), pieces, strict=True))
