"""`watch` with unusual tokens, keys or layers, with several watches, and in threads."""

import gc
import math
import threading

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.torch_models import torch
from tests.oracles.watched_stack import Attention, D, F, Layers, N, X, measure_row, nn, ratio


class Sink(Attention):
    """A learned sink as one more key, or a one that is added to the softmax's denominator."""

    def __init__(self, learned):
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(1)) if learned else None

    def forward(self, x):
        scores = self.a(x) @ self.b(x).mT / 4
        if self.sink is None:
            size = scores.exp()
            return size / (1 + size.sum(-1, keepdim=True)) @ self.c(x)
        scores = torch.cat([scores, self.sink.expand(*scores.shape[:-1], 1)], dim=-1)
        return F.dropout(scores.softmax(-1)[..., :-1], 0.1) @ self.c(x)


@pytest.mark.parametrize("learned", [True, False])
def test_what_goes_to_a_sink_is_one_key_more(learned):
    model = Sink(learned)
    row = measure_row(model, X)
    scores = (model.a(X) @ model.b(X).mT / 4).detach()
    p = F.pad(scores, (0, 1)).softmax(-1)
    assert row["attention_entropy"][0] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), 1e-4)
    assert row["missing_mass"][0] == pytest.approx(p[..., -1].mean().item(), 1e-4)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("is_float", [False, True])
def test_attention_of_torch_with_keys_that_are_no_tokens(options, is_float):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(D, 2, batch_first=True, **options)
    padding = torch.arange(N) >= torch.tensor([N, 4])[:, None]
    causal = torch.ones(N, N, dtype=torch.bool).triu(1)
    if is_float:
        padding, causal = (
            torch.zeros(a.shape).masked_fill(a, -torch.inf) for a in (padding, causal)
        )
    masks = {"key_padding_mask": padding, "attn_mask": causal}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x):
            return self.attention(x, x, x, **masks, need_weights=False)[0]

    row = measure_row(Model(), X)
    p = model(X, X, X, **masks, average_attn_weights=False)[1].detach()
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1).mean(1)
    expected = np.mean([entropy[0].mean().item(), entropy[1, :4].mean().item()])
    assert row["attention_entropy"][0] == pytest.approx(expected, 1e-4)
    assert row["residual_ratio"][0] == pytest.approx(ratio(X[0], X[1, :4]), 1e-4)


class Latent(nn.Module):
    """Multi-head latent attention, as DeepSeek's."""

    def __init__(self):
        super().__init__()
        self.q_a, self.norm, self.q_b = nn.Linear(D, 8), nn.LayerNorm(8), nn.Linear(8, 24)
        self.kv_a, self.kv_b = nn.Linear(D, 12), nn.Linear(8, 32)

    def forward(self, x):
        q = self.q_b(self.norm(self.q_a(x))).unflatten(-1, (2, 12)).transpose(1, 2)
        small, turned = self.kv_a(x).split([8, 4], dim=-1)
        fused = self.kv_b(self.norm(small)).unflatten(-1, (2, 16)).transpose(1, 2)
        k, v = fused.split([8, 8], dim=-1)
        k = torch.cat([k, turned[:, None].expand(-1, 2, -1, -1)], dim=-1)
        return F.scaled_dot_product_attention(q, k, v)


def test_gradients_of_latent_attention():
    model = Latent()
    row = measure_row(model, X)
    rows = torch.arange(32).reshape(2, 16)
    parts = {
        "query": [(model.q_a, slice(None)), (model.q_b, slice(None))],
        "key": [(model.kv_a, slice(None)), (model.kv_b, rows[:, :8].flatten())],
        "value": [(model.kv_a, slice(8)), (model.kv_b, rows[:, 8:].flatten())],
    }
    for name, maps in parts.items():
        squares = [p.grad[i].square().sum().item() for f, i in maps for p in (f.weight, f.bias)]
        assert row[f"{name}_gradient"][0] == pytest.approx(math.sqrt(sum(squares)), 1e-4)
    assert row["residual_ratio"][0] == pytest.approx(ratio(*X), 1e-4)


class Masked(nn.Module):
    """Padding attends to padding, as in ESMC."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x, attention_mask):
        same = attention_mask[:, :, None] == attention_mask[:, None]
        return self.inner(x, same[:, None])


def test_padding_that_attends_to_padding_does_not_count():
    mask = torch.arange(N)[None] < torch.tensor([N, 4])[:, None]
    for options in ({}, {"mask": lambda args, kwargs: args[1]}):
        row = measure_row(Masked(), X, mask, **options)
        assert row["residual_ratio"][0] == pytest.approx(ratio(X[0], X[1, :4]), 1e-4)


class Fewer(nn.Module):
    """Has fewer keys than tokens, as Segformer; `Joint` adds those of a text, as SD3."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.pool = nn.Conv1d(D, D, 2, 2)

    def forward(self, x):
        k, v = self.kv(self.pool(x.mT).mT).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(self.q(x)[:, None], k[:, None], v[:, None])


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)

    def forward(self, x):
        fused = torch.cat([self.text(x[:, :4].clone()), self.image(x[:, 4:].clone())], dim=1)
        return F.scaled_dot_product_attention(*fused[:, None].chunk(3, dim=-1))


@pytest.mark.parametrize("kind", [Fewer, Joint])
def test_tokens_are_what_made_the_queries(kind):
    row = measure_row(kind(), X)
    assert row["residual_ratio"] == pytest.approx([ratio(*X)], 1e-4)
    assert np.isfinite(row["attention_entropy"]).all() and "cross.attention_entropy" not in row


@pytest.mark.full
def test_watches_beside_each_other():
    """Three watches of one model measure its weights; one of them outlives the model."""
    model = Layers()
    watches = [watch(model, 1, tokens=kind) for kind in ("read", "raw", "unit")]
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    entropies = [watched.rows[0]["attention_entropy"] for watched in watches]
    assert entropies[0] == entropies[1] == entropies[2]
    del model
    gc.collect()
    watches[0].close()


def test_threads_make_and_close_watches():
    errors = []

    def train():
        try:
            for _ in range(3):
                model = Layers()
                watched, optimizer = watch(model, 1), torch.optim.SGD(model.parameters(), 0.1)
                for _ in range(2):
                    model(X).square().mean().backward()
                    optimizer.step()
                assert len(watched.rows) == 2
                watched.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Other(nn.Module):
    """Attention of torch to other tokens, of which one matrix holds all three parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.cross = (nn.MultiheadAttention(D, 2, batch_first=True) for _ in range(2))

    def forward(self, x):
        other_tokens = self.first(x, x, x)[0][:, :7]
        return self.cross(x, other_tokens, other_tokens)[0]


def test_gradients_of_attention_of_torch_to_other_tokens():
    model = Other()
    row = measure_row(model, X)
    gradients = [model.cross.in_proj_weight.grad, model.cross.in_proj_bias.grad[:, None]]
    norms = [part.norm().item() for part in torch.cat(gradients, dim=1).chunk(3)]
    names = [f"cross.{part}_gradient" for part in ("query", "key", "value")]
    assert [row[name][1] for name in names] == pytest.approx(norms, 1e-4)


class Blocks(nn.Module):
    """A block with one or two attentions, whose last attention is to other tokens."""

    def __init__(self, num_first):
        super().__init__()
        torch.manual_seed(0)
        block = nn.ModuleList([nn.MultiheadAttention(D, 2, batch_first=True) for _ in range(3)])
        self.block, self.num_first = block, num_first
        block.forward = self.run_block

    def forward(self, x):
        return self.block(x)

    def run_block(self, x):
        *attentions, cross = self.block
        other_tokens = x
        for attention in attentions[: self.num_first]:
            other_tokens = attention(other_tokens, other_tokens, other_tokens)[0]
        return cross(x, other_tokens[:, :7], other_tokens[:, :7])[0]


@pytest.mark.parametrize("num_first, place", [(1, 0), (2, 2)])
def test_attention_to_other_tokens_is_of_the_one_layer_of_its_block(num_first, place):
    """With two layers in the block it is of neither, and has a number of its own."""
    row = measure_row(Blocks(num_first), X)
    is_measured = np.isfinite(row["cross.attention_entropy"])
    assert np.flatnonzero(is_measured).tolist() == [place]
    assert np.flatnonzero(np.isfinite(row["residual_ratio"])).tolist() == [*range(num_first)]


class Apart(Attention):
    """Three matrices and three biases for torch's function of attention, as in WavLM."""

    def forward(self, x):
        maps = [self.a, self.b, self.c]
        options = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), maps, strict=True))
        return F.multi_head_attention_forward(
            *[x.transpose(0, 1)] * 3, D, 2, None, torch.cat([f.bias for f in maps]), None, None,
            False, 0.0, torch.eye(D), None, use_separate_proj_weight=True,
            **{name: f.weight for name, f in options.items()},
        )[0]  # fmt: skip


def test_gradients_of_biases_that_are_joined_and_split_again():
    model = Apart()
    row = measure_row(model, X)
    for part, f in zip(("query", "key", "value"), (model.a, model.b, model.c), strict=True):
        norm = torch.cat([f.weight.grad, f.bias.grad[:, None]], dim=1).norm().item()
        assert row[f"{part}_gradient"] == pytest.approx([norm], 1e-4)


class WrittenOut(Attention):
    """Causal attention of one head, written with matrix products."""

    def forward(self, x):
        scores = self.a(x) @ self.b(x).mT / 4
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ self.c(x)


class InOneKernel(Attention):
    """Causal attention of one head, in one call of torch."""

    def forward(self, x):
        q, k, v = self.a(x), self.b(x), self.c(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("tokens", ["read", "raw", "unit"])
@pytest.mark.parametrize("attention", [WrittenOut, InOneKernel])
def test_a_call_without_a_batch_axis_is_measured_as_one_example(attention, tokens):
    model = Layers()
    model.h = nn.ModuleList([attention(), attention()])
    single = measure_row(model, X[0], tokens=tokens)
    model.zero_grad()
    batch = measure_row(model, X[:1], tokens=tokens)
    assert single.keys() == batch.keys() and "attention_entropy" in single
    for name, values in batch.items():
        assert single[name] == pytest.approx(values, rel=1e-5), name
