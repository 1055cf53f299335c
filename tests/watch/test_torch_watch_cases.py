"""`watch` with unusual tokens, keys or layers, with several watches, and in threads."""

import copy
import gc
import itertools
import math
import threading

import numpy as np
import pytest

pytest.importorskip("torch")

import rank_collapse as rc
from rank_collapse.torch import watch
from rank_collapse.watch import torch_products
from tests.oracles.torch_models import torch

nn, F = torch.nn, torch.nn.functional
D, N = 16, 10
X = torch.randn(2, N, D, generator=torch.Generator().manual_seed(0))


def measure_row(model, *inputs, **options):
    watched = watch(model, 1, **options)
    model(*inputs).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    return watched.rows[0]


def ratio(*texts):
    return np.mean([rc.residual_ratio(text.numpy()) for text in texts])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x, mask=None):
        q, k, v = (f(x)[:, None] for f in (self.a, self.b, self.c))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class Layers(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Attention() for _ in range(depth))

    def forward(self, x):
        for layer in self.h:
            x = x + layer(x)
        return x


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
    assert "no tokens: its products are of different tokens" in watched.describe()
    assert "no weights: 4 products in one run" in watched.describe()
    (row,) = watched.rows
    assert not any("ratio" in name or "entropy" in name for name in row)
    norms = [row[f"{part}_gradient"][0] for part in ("query", "key", "value")]
    assert norms == pytest.approx(compute_gradient_norms(model[0]), 1e-4)


class Swapped(Attention):
    """Every product has its factors in the other order."""

    def forward(self, x):
        q = torch.einsum("dk,bnk->bnd", self.a.weight, x)
        scores = torch.einsum("bmd,bnd->bnm", self.b(x), q) / 4
        return torch.einsum("bmd,bnm->bnd", self.c(x), scores.softmax(-1))


def test_products_in_the_other_order():
    model = Swapped()
    row = measure_row(model, X)
    scores = (X @ model.a.weight.T) @ model.b(X).mT / 4
    p = scores.detach().softmax(-1)
    assert row["residual_ratio"] == pytest.approx([ratio(*X)], 1e-4)
    assert row["attention_entropy"][0] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), 1e-4)
    assert row["query_gradient"][0] == pytest.approx(model.a.weight.grad.norm().item(), 1e-4)


class Towers(nn.Module):
    """One network for two inputs."""

    def __init__(self):
        super().__init__()
        self.tower = Layers()

    def forward(self, x):
        return self.tower(x) * self.tower(x.flip(0, 1)[:1])


def test_of_two_inputs_of_one_network_the_first_is_measured():
    model = Towers()
    watched = watch(model, 1)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    reason = "of calls on different tokens the first is measured"
    assert watched.describe().count(reason) == 2
    assert watched.rows[0]["residual_ratio"][0] == pytest.approx(ratio(*X), 1e-4)
    assert len(watched.rows[0]["residual_ratio"]) == 2


def test_texts_of_one_token_are_left_out():
    model = Layers()
    watched = watch(model, 1)
    model(X[:, :1]).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert watched.describe().count("no tokens: 2 examples of 1 tokens") == 2
    assert watched.describe().count("no weights: 2 examples of 1 keys") == 2
    assert watched.rows[0].keys() == {"step", *(f"{p}_gradient" for p in ("query", "key", "value"))}


class Features(nn.Module):
    """Attention among features, as in XCiT."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q.mT @ k).softmax(-1) @ v.mT


def test_attention_among_features_is_left_out():
    model = Features()
    watched = watch(model, 1)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert "softmax is over something else" in watched.describe()
    assert not any("entropy" in name or "ratio" in name for row in watched.rows for name in row)


@pytest.mark.parametrize(
    "layers, numbers",
    [(0, [0]), ([0, 2], [0, 2]), ("h.1", [1]), (lambda name, module: name.endswith("2"), [2])],
)
def test_layers_are_chosen_by_number_name_or_function(layers, numbers):
    ratios = measure_row(Layers(3), X)["residual_ratio"]
    chosen = measure_row(Layers(3), X, layers=layers)["residual_ratio"]
    assert [v for v in chosen if v == v] == [ratios[i] for i in numbers]


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


def test_an_empty_batch_stops_no_measure():
    model = Layers()
    watched, optimizer = watch(model, 1), torch.optim.SGD(model.parameters(), 0.0)
    for batch in (X, X[:0], X):
        model(batch).sum().backward()
        optimizer.step()
    watched.close()
    first, last = watched.rows[0], watched.rows[-1]
    assert last["step"] == 2 and last["residual_ratio"] == first["residual_ratio"]


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        for _ in range(3):
            x = x + self.attention(x)
        return x


def test_a_failure_is_tried_again(monkeypatch, caplog):
    """The warning comes once, whatever its text is."""
    choose_rows = torch_products.choose_rows
    is_broken = (True, True, False, True, True, True, True, False)

    def choose_or_raise(*args):
        if is_broken[watched.step]:
            raise MemoryError(f"no memory is left at step {watched.step}")
        return choose_rows(*args)

    monkeypatch.setattr(torch_products, "choose_rows", choose_or_raise)
    model = Loop()
    watched, optimizer = watch(model, 1), torch.optim.SGD(model.parameters(), 0.0)
    for step, fails in enumerate(is_broken):
        model(X).sum().backward()
        optimizer.step()
        assert (f"left at step {step}" in watched.describe()) == fails
    measured = [row["step"] for row in watched.rows if "attention_entropy" in row]
    assert measured == [2, 7] and np.isfinite(watched.rows[0]["attention_entropy"]).all()
    assert caplog.text.count("no memory is left") == 1


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
