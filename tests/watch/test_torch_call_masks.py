"""Masks of a model's call: which count, by their names and by the streams that were given them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
import torch

from rank_collapse.watch.recorder import Notes
from rank_collapse.watch.torch_call_masks import _TOKEN_MASK, CallMasks, _list_masks
from rank_collapse.watch.torch_products import Weights

PREFIXES = (
    "attention attn padding pad key_padding src_key_padding input token src source valid key text "
    "seq sequence x decoder_attention"
)


def test_masks_of_tokens_have_these_names():
    for name in PREFIXES.split():
        for mask in (f"{name}_mask", f"{name}mask", f"{name}_masks"):
            assert _TOKEN_MASK.fullmatch(mask), mask
    assert _TOKEN_MASK.fullmatch("mask") and _TOKEN_MASK.fullmatch("masks")
    for other in ("head_mask", "causal_mask", "cross_attention_mask", "mask_ratio", "padding"):
        assert not _TOKEN_MASK.fullmatch(other), other


def test_a_mask_for_the_tokens_of_another_stream_does_not_count_under_any_name():
    """A decoder layer that attends to the encoder has the encoder's mask under another name."""
    decoder, encoder = object(), object()
    model = SimpleNamespace(
        masks=[("attention_mask", encoder), ("decoder_attention_mask", decoder)]
    )
    layer = SimpleNamespace(
        masks=[("attention_mask", decoder), ("encoder_attention_mask", encoder)]
    )
    assert _list_masks([model, layer]) == [
        ("decoder_attention_mask", decoder),
        ("attention_mask", decoder),
    ]
    assert _list_masks([model]) == model.masks
    inner = SimpleNamespace(masks=[("mask", encoder)])  # which the encoder inside was given
    assert _list_masks([model, layer, inner])[0] == ("attention_mask", encoder)
    both = SimpleNamespace(masks=[("mask", encoder), ("memory_mask", encoder)])
    assert _list_masks([both]) == [("mask", encoder)]


KEPT, ALL = torch.tensor([[True, True, False]]), torch.ones(1, 3, dtype=torch.bool)


def find_mask(masks, stream, *, fits=lambda side: False, hides=lambda side: False, p=0.5, **call):
    """Finds the mask of a call whose queries give the keys the weights p."""
    e, n = next(iter(call.values())).shape
    index = torch.arange(e * n).reshape(e, n)
    tokens = SimpleNamespace(index=index, has_own_keys=lambda: True)
    weights = Weights(torch.zeros(e, n, n) + p, torch.arange(n), torch.ones(1, n, n) > 0)
    frames = [SimpleNamespace(masks=list(call.items()))]
    return masks.find(frames, tokens, weights, fits, hides, stream)


def is_kept(mask):
    return torch.equal(mask, KEPT)


def test_the_mask_of_the_watch_counts_where_it_has_the_shape_of_the_tokens():
    masks = CallMasks(True, Notes())
    for mask in (None, KEPT.tolist(), KEPT.expand(2, 3), KEPT[0]):
        masks.watch_mask = mask
        assert find_mask(masks, "a", fits=is_kept, attention_mask=KEPT) == (None, None)
    masks.watch_mask = KEPT.long()
    mask, crossed = find_mask(masks, "a", fits=is_kept, attention_mask=ALL)
    assert mask.dtype == torch.bool and is_kept(mask) and crossed is None


def test_a_mask_counts_by_the_reading_that_fits_or_by_none():
    for mask in (KEPT, ~KEPT, KEPT.long(), (~KEPT).long()):
        read, crossed = find_mask(CallMasks(False, Notes()), "a", fits=is_kept, any_mask=mask)
        assert is_kept(read) and crossed is None
    assert find_mask(CallMasks(False, Notes()), "a", fits=is_kept, any_mask=ALL) == (None, None)


def test_a_mask_past_which_a_stream_reads_is_of_that_stream_unless_another_obeys_it():
    """Only a name of tokens' masks counts where attention crosses it."""
    notes = Notes()
    masks = CallMasks(False, notes)
    assert find_mask(masks, "a", mask_of_scores=KEPT) == (None, None)
    for _ in range(2):  # two layers, which read past the same mask
        mask, crossed = find_mask(masks, "a", attention_mask=KEPT)
        assert is_kept(mask) and (crossed.name, crossed.stream) == ("attention_mask", "a")
        crossed.runs.append(SimpleNamespace(name=f"h.{len(crossed.runs)}"))
    _, other = find_mask(masks, "c", valid_mask=KEPT)
    other.runs.append(SimpleNamespace(name="g"))
    assert find_mask(masks, "b", attention_mask=KEPT) == (None, None)  # it is of a
    assert find_mask(masks, "b", fits=is_kept, attention_mask=KEPT) == (None, None)
    masks.end_pass()
    assert {key: text.split()[-3] for key, text in notes.reasons.items()} == {
        ("h.0", "reading past attention_mask"): "attention_mask",
        ("h.1", "reading past attention_mask"): "attention_mask",
        ("g", "reading past valid_mask"): "valid_mask",
    }
    assert len(crossed.runs) == 2
    crossed.runs.clear()
    mask, none = find_mask(masks, "a", fits=is_kept, attention_mask=KEPT)  # a third layer obeys it
    assert is_kept(mask) and none is None
    assert find_mask(masks, "b", fits=is_kept, attention_mask=KEPT) == (None, None)


def test_another_stream_that_obeys_a_mask_gives_the_first_its_tokens_back():
    masks = CallMasks(False, Notes())
    _, crossed = find_mask(masks, "a", attention_mask=KEPT)
    spare = SimpleNamespace(tokens=1, scalars={"b": 2}, pieces=[3], products=[4])
    runs = [SimpleNamespace(spare=spare), SimpleNamespace(spare=spare)]
    crossed.runs.extend(runs)
    mask, none = find_mask(masks, "b", fits=is_kept, hides=is_kept, attention_mask=KEPT)
    assert is_kept(mask) and none is None
    for run in runs:
        assert (run.tokens, run.scalars, run.pieces, run.products) == (1, {"b": 2}, [3], [4])
        assert run.spare is None
    assert find_mask(masks, "a", attention_mask=KEPT) == (None, None)


def test_a_mask_that_fits_nothing_counts_where_its_keys_have_no_weight():
    """By its likelier reading or the other; by none if examples are as many as tokens."""
    p = torch.tensor([0.5, 0.5, 0.0])
    for mask in (KEPT, ~KEPT):
        masks = CallMasks(False, Notes())
        read, crossed = find_mask(masks, "a", p=p, attention_mask=mask)
        assert is_kept(read) and crossed is None
        assert find_mask(masks, "b", p=p, attention_mask=mask) == (None, None)  # it is of a
    square = KEPT.expand(3, 3)
    assert find_mask(CallMasks(False, Notes()), "a", p=p, mask=square) == (None, None)
    read, _ = find_mask(CallMasks(False, Notes()), "a", p=p, fits=torch.any, mask=square)
    assert read is not None and torch.equal(read, square)
