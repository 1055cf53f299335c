"""Masks of a model's call: which count, by their names and by the streams that were given them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from rank_collapse.watch.torch_call_masks import _TOKEN_MASK, _list_masks

OF_TOKENS = (
    "attention attn padding pad key_padding src_key_padding input token src source valid key text "
    "seq sequence x decoder_attention"
)


def test_masks_of_tokens_have_these_names():
    for name in OF_TOKENS.split():
        for mask in (f"{name}_mask", f"{name}mask", f"{name}_masks"):
            assert _TOKEN_MASK.fullmatch(mask), mask
    assert _TOKEN_MASK.fullmatch("mask") and _TOKEN_MASK.fullmatch("masks")
    for other in ("head_mask", "causal_mask", "cross_attention_mask", "mask_ratio", "padding"):
        assert not _TOKEN_MASK.fullmatch(other), other


def test_a_mask_for_the_tokens_of_another_stream_does_not_count_under_any_name():
    """A decoder layer that attends to the encoder has the encoder's mask under another name."""
    own, encoder = object(), object()
    model = SimpleNamespace(masks=[("attention_mask", encoder), ("decoder_attention_mask", own)])
    layer = SimpleNamespace(masks=[("attention_mask", own), ("encoder_attention_mask", encoder)])
    assert _list_masks([model, layer]) == [("decoder_attention_mask", own), ("attention_mask", own)]
    assert _list_masks([model]) == model.masks
    both = SimpleNamespace(masks=[("mask", encoder), ("memory_mask", encoder)])
    assert _list_masks([both]) == [("mask", encoder)]
