"""Calls are refused whose cache has exchanged rows, as in beam search, or has lost tokens."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rank_collapse.agree.recording import open_recording  # noqa: E402
from rank_collapse.torch import record  # noqa: E402
from rank_collapse.torch.caches import CacheRows, find_keys  # noqa: E402
from tests.support.refusals import is_refused  # noqa: E402

LINE = "rows of its cache were exchanged, as in beam search: .* Record without beams"
LOST = "its cache lost the last 1 of 3 tokens, as in speculative decoding: they are no tokens of"
KEYS = torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def generate(path, **options):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=49, **sizes)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(3, 40, (2, 5))
    with record(model, path):
        model.generate(
            ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=1, **options
        )


def test_beam_search_is_refused_and_other_generation_is_not(tmp_path):
    is_refused(LINE, generate, tmp_path / "a.safetensors", num_beams=3)
    assert not (tmp_path / "a.safetensors").exists()
    generate(tmp_path / "b.safetensors")
    recording = open_recording(tmp_path / "b.safetensors")
    assert recording.shape == (2, 9, 16) and recording.read_token_ids().shape == (2, 9)


@pytest.mark.parametrize("kind", ["tuple", "layers", "encoder-decoder"])
def test_rows_are_compared_from_the_end_of_a_call_to_the_next(kind):
    def make(keys):
        if kind == "tuple":
            return ((keys * 2, keys), (keys, keys * 2))
        cache = SimpleNamespace(layers=[SimpleNamespace(keys=k) for k in (keys * 2, keys)])
        return cache if kind == "layers" else SimpleNamespace(self_attention_cache=cache)

    assert torch.equal(find_keys(make(KEYS)), KEYS)
    rows = CacheRows()
    rows.begin_call({"past_key_values": None})
    broken = KEYS.clone()
    broken[0, 0, 0, 0] = np.nan
    rows.end_call(SimpleNamespace(past_key_values=make(broken)))
    for keys in (broken, broken[:, :, 1:], broken[:, :, :0], broken[:2]):  # the same; other ones
        rows.begin_call({"past_key_values": make(keys)})
    is_refused(LOST, rows.begin_call, {"past_key_values": make(broken[:, :, :2])})
    rows.begin_call({})
    rows.begin_call({"past_key_values": make(broken)})
    is_refused(LINE, rows.begin_call, {"past_key_values": make(broken[[1, 0, 2, 3]])})
    rows.begin_call({})
    rows.end_call(SimpleNamespace())
    rows.begin_call({"past_key_values": make(KEYS)})  # no keys of the call before


def test_what_is_no_cache_has_no_keys():
    for cache in (None, (), [], SimpleNamespace(layers=[]), (None,), SimpleNamespace(layers=[0])):
        assert find_keys(cache) is None
    for cache in (((),), ((KEYS[0, 0, 0],),), ((3, KEYS),)):  # empty, without rows, no tensor
        assert find_keys(cache) is None


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_cache_is_compared_if_no_output_holds_it_and_if_its_tensors_are_kept(is_in_place):
    """A cache of fixed size stays one tensor, in which the rows are exchanged."""
    keys, rows = KEYS.clone(), CacheRows()
    rows.begin_call({"past_key_values": ((keys, keys),)})
    rows.end_call((torch.ones(2),))
    order = [1, 0, 2, 3]
    if is_in_place:
        keys.copy_(KEYS[order])
    else:
        keys = KEYS[order]
    is_refused(LINE, rows.begin_call, {"past_key_values": ((keys, keys),)})
