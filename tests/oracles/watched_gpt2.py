"""A small GPT-2 of transformers, its training, and the rows that a watch gives of it."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
transformers = pytest.importorskip("transformers")

from rank_collapse.torch import watch  # noqa: E402
from rank_collapse.watch.torch_products import ROWS  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402

L, V = 3, 97
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1}
IDS = torch.arange(4 * 12).reshape(4, 12) * 7 % V


def gpt2(**fields):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": L, "n_head": 4, "vocab_size": V, "n_positions": 2 * ROWS}
    config = transformers.GPT2Config(**sizes, **SPECIAL, **fields)
    return transformers.GPT2LMHeadModel(config).train()


def train_gpt2(model, steps=4, accumulated=1, ids=IDS):
    """Trains for some steps of Adam; returns the losses."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulated):
            loss = model(input_ids=ids, labels=ids).loss / accumulated
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def measure_rows(model, every=2, **options):
    watched = watch(model, every)
    train_gpt2(model, **options)
    watched.close()
    return watched.rows


def close(rows, other_rows, rtol=1e-5):
    assert len(rows) == len(other_rows) == 2
    for row, other in zip(rows, other_rows, strict=True):
        assert row.keys() == other.keys()
        for name in row:
            assert_close(other[name], row[name], rtol, 1e-6, err_msg=name)


QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
