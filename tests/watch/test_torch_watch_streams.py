"""Masks of one stream of tokens do not count in another: decoders, and towers beside each other."""

import numpy as np
import pytest

pytest.importorskip("torch")

from rank_collapse.torch import watch
from tests.oracles.measured_layers import (
    LEFT,
    RIGHT,
    Attention,
    X,
    compute_ratio,
    nn,
    torch,
)

N = X.shape[1]
ALL = torch.ones_like(RIGHT)
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)


class Tower(nn.Module):
    """Two layers whose attention reads a mask, if it gets one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention(self.weigh) for _ in range(2))
        self.kept: dict = {"read": [], "raw": []}

    @staticmethod
    def weigh(scores, mask):
        hidden = torch.tensor(False) if mask is None else mask[:, None, None] == 0
        return scores.masked_fill(hidden, -1e9).softmax(-1)

    def forward(self, x, allowed=None):
        for layer in self.layers:
            result = layer(x, allowed)
            self.kept["read"].append(x.detach())
            self.kept["raw"].append(result.detach())
            x = x + result
        return x


class Towers(nn.Module):
    """One tower reads all tokens, the other one those of the mask."""

    def __init__(self, is_text_first):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.is_text_first = Tower(), Tower(), is_text_first

    def forward(self, pixels, x, attention_mask):
        towers = [(self.image, pixels, None), (self.text, x, attention_mask)]
        outputs = [tower(y, mask) for tower, y, mask in towers[:: -1 if self.is_text_first else 1]]
        return sum(output.mean() for output in outputs)


@pytest.mark.parametrize("tokens", ["read", "raw"])
@pytest.mark.parametrize("is_text_first", [False, True])
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
def test_a_mask_counts_only_in_the_tower_that_reads_it(mask, is_text_first, tokens, caplog):
    model = Towers(is_text_first)
    watched = watch(model, 1, tokens=tokens)
    model(X.flip(0), X, attention_mask=mask).backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    towers = [(model.image, ALL), (model.text, mask)]
    expected = [
        compute_ratio(x, exists)
        for tower, exists in towers[:: -1 if is_text_first else 1]
        for x in tower.kept[tokens]
    ]
    np.testing.assert_allclose(watched.rows[0]["residual_ratio"], expected, rtol=1e-3)
    assert "attention reads tokens" not in caplog.text + watched.describe()


@pytest.mark.parametrize("has_target_mask", [False, True])
@pytest.mark.parametrize("has_source_mask", [False, True])
def test_masks_of_an_encoder_and_a_decoder_of_equal_lengths(has_source_mask, has_target_mask):
    torch.manual_seed(0)
    model = nn.Transformer(X.shape[-1], 2, 2, 2, 8, dropout=0.0, batch_first=True)
    reads: list = []
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: reads.append(args[0].detach()), with_kwargs=True
        )
    masks = {"memory_key_padding_mask": RIGHT == 0}
    if has_source_mask:
        masks["src_key_padding_mask"] = RIGHT == 0
    if has_target_mask:
        masks["tgt_key_padding_mask"] = RIGHT.flip(0) == 0
    watched = watch(model, 1)
    model(X, X.flip(0), tgt_mask=CAUSAL, **masks).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    sides = [RIGHT if has_source_mask else ALL] * 2 + [
        RIGHT.flip(0) if has_target_mask else ALL
    ] * 2
    expected = [compute_ratio(x, exists) for x, exists in zip(reads, sides, strict=True)]
    ratios = [ratio for ratio in watched.rows[0]["residual_ratio"] if np.isfinite(ratio)]
    np.testing.assert_allclose(ratios, expected, rtol=1e-3)


@pytest.mark.parametrize("case", ["memory given", "decoder mask alone"])
def test_a_decoder_of_transformers_beside_as_many_source_tokens(case):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    torch.manual_seed(0)
    sizes = {f"{half}_{name}": n for half in ("encoder", "decoder")
             for name, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 8))}  # fmt: skip
    config = transformers.BartConfig(
        d_model=16, vocab_size=30, max_position_embeddings=32, pad_token_id=0, dropout=0.0,
        decoder_start_token_id=2, **sizes,
    )  # fmt: skip
    model = transformers.BartModel(config).train()
    ids = torch.arange(3 * N).reshape(3, N) % 27 + 3
    if case == "memory given":
        memory = BaseModelOutput(last_hidden_state=torch.randn(3, N, 16))
        inputs = {"encoder_outputs": memory, "attention_mask": RIGHT}
        sides = {"decoder": ALL}
    else:
        inputs, sides = {"input_ids": ids}, {"encoder": ALL, "decoder": RIGHT}
        inputs["decoder_attention_mask"] = RIGHT
    reads: list = []
    for half in sides:
        for layer in getattr(model, half).layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs, half=half: reads.append(
                    (kwargs["hidden_states"] if not args else args[0], sides[half])
                ),
                with_kwargs=True,
            )
    watched = watch(model, 1)
    model(decoder_input_ids=ids, **inputs).last_hidden_state.square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    watched.close()
    expected = [compute_ratio(x.detach(), side) for x, side in reads]
    ratios = [ratio for ratio in watched.rows[0]["residual_ratio"] if np.isfinite(ratio)]
    np.testing.assert_allclose(ratios, expected, rtol=1e-3)
