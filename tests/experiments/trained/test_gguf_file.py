"""Files of llama.cpp and CTranslate2 against what `transformers` makes of the same weights."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from tests.support.refusals import is_refused

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import transformers


import rank_collapse as rc
from experiments.trained import gguf_file
from rank_collapse import pretrained
from rank_collapse.text import encoders
from tests.support.closeness import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WORDS = ["a", "b", "1", "2", "Ġ", "ab", "Ġa"]


SIZES = {
    "block_count": 2,
    "context_length": 16,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 500.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
TOKENIZER = {"model": "gpt2", "pre": "smollm", "tokens": WORDS, "merges": ["a b", "Ġ a"]}


def write_gguf(gguf, path, tensors, kind=None, **changes):
    """Writes a file of a Llama; `changes` are entries by their full name, None without it."""
    entries = {f"llama.{name}": value for name, value in SIZES.items()}
    entries |= {f"tokenizer.ggml.{name}": value for name, value in TOKENIZER.items()}
    entries |= changes
    writer = gguf.GGUFWriter(path, entries.pop("general.architecture", "llama"))
    types = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    types |= {str: writer.add_string, list: writer.add_array}
    for name, value in entries.items():
        if value is not None:
            types[type(value)](name, value)
    for name, values in tensors.items():
        if kind is not None and values.ndim == 2 and name.startswith("blk"):
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def draw_tensors(width=16):
    """Draws a Llama of two layers, 4 heads of a width and 2 groups of keys, as in a GGUF file."""
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(WORDS), 64), "output_norm": (64,)}
    for i in range(2):
        heads = {"q": 4, "k": 2, "v": 2}
        shapes |= {f"blk.{i}.attn_{k}": (n * width, 64) for k, n in heads.items()}
        shapes |= {f"blk.{i}.attn_output": (64, 4 * width), f"blk.{i}.ffn_down": (64, 96)}
        shapes |= {f"blk.{i}.ffn_gate": (96, 64), f"blk.{i}.ffn_up": (96, 64)}
        shapes |= {f"blk.{i}.{norm}_norm": (64,) for norm in ("attn", "ffn")}
    return {
        f"{name}.weight": draw.standard_normal(shape).astype(np.float32) * 0.2
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_gguf_file_is_the_llama_that_transformers_reads(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(gguf, path, draw_tensors(), gguf.GGMLQuantizationType[kind])
    gguf_file.from_gguf(path, tmp_path)
    config, params = pretrained.load(tmp_path)
    ids = np.array([0, 5, 2, 6, 3, 1])
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    with torch.no_grad():
        states = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    expected = torch.cat(states).numpy()
    assert_close(rc.apply(params, ids, config).hidden_states, expected, atol=2e-5)
    encode = encoders.load_tokenizer(tmp_path, pretrained.settings_of(tmp_path))
    assert [WORDS[i] for i in encode("ab a12")] == ["ab", "Ġa", "1", "2"]


def llama_of(tensors, theta, width):
    """Makes the Llama of transformers of the tensors of a GGUF file, by the rule of llama.cpp.

    Its converter orders the features of a head (first, second half) as pairs; this undoes it.
    """
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "head_dim": width,
        "rope_theta": theta,
        "vocab_size": len(WORDS),
        "tie_word_embeddings": True,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    names = gguf_file._LAYER | gguf_file._OUTSIDE
    state = {}
    for full, values in tensors.items():
        *layer, kind, _ = full.split(".")
        if kind in ("attn_q", "attn_k"):
            rows = values.reshape(-1, width, 64)
            values = np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).reshape(-1, 64)
        place = f"model.layers.{layer[1]}." if layer else ""
        state[f"{place}{names[kind]}.weight"] = torch.from_numpy(values)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


@pytest.mark.parametrize(
    ("width", "changes", "theta"),
    [
        (24, {"llama.attention.key_length": 24, "llama.attention.value_length": 24}, 500.0),
        (16, {"llama.rope.freq_base": None}, 10000.0),
        (16, {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": 16}, 500.0),
        (16, {"llama.vocab_size": len(WORDS), "general.name": "a", "llama.expert_count": 0}, 500.0),
    ],
)
def test_what_a_gguf_file_says_of_its_heads_is_read(width, changes, theta, tmp_path):
    gguf = pytest.importorskip("gguf")
    tensors = draw_tensors(width)
    write_gguf(gguf, tmp_path / "model.gguf", tensors, **changes)
    gguf_file.from_gguf(tmp_path / "model.gguf", tmp_path)
    config, params = pretrained.load(tmp_path)
    ids = np.array([0, 5, 2, 6, 3, 1])
    with torch.no_grad():
        model = llama_of(tensors, theta, width)
        states = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    expected = torch.cat(states).numpy()
    assert_close(rc.apply(params, ids, config).hidden_states, expected, atol=2e-5)


@pytest.mark.parametrize("has_output", [True, False])
def test_the_output_matrix_is_that_of_the_file_or_of_the_embedding(has_output, tmp_path):
    gguf = pytest.importorskip("gguf")
    tensors = draw_tensors()
    if has_output:
        tensors["output.weight"] = 2 * tensors["token_embd.weight"]
    write_gguf(gguf, tmp_path / "model.gguf", tensors)
    gguf_file.from_gguf(tmp_path / "model.gguf", tmp_path)
    config = pretrained.settings_of(tmp_path)
    assert config["tie_word_embeddings"] is not has_output
    expected = tensors["output.weight" if has_output else "token_embd.weight"]
    stored = safetensors_numpy.load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is has_output
    name = "lm_head.weight" if has_output else "model.embed_tokens.weight"
    np.testing.assert_array_equal(stored[name], expected)


def make_entries(**changes):
    """Makes the header of a file, without the library that writes one."""
    entries = {f"llama.{name}": value for name, value in SIZES.items()}
    entries |= {f"tokenizer.ggml.{name}": value for name, value in TOKENIZER.items()}
    return {"general.architecture": "llama"} | entries | changes


def test_sizes_that_a_header_does_not_have_follow_from_others():
    entries = make_entries()
    for name in ("attention.head_count_kv", "rope.freq_base"):
        del entries[f"llama.{name}"]
    assert gguf_file.read_sizes("a.gguf", entries) == {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(WORDS),
        "head_dim": 16,
    }
    assert gguf_file.read_sizes("a.gguf", make_entries())["num_key_value_heads"] == 2
    refused = {
        "llama.block_count": (0, "a.gguf: llama.block_count=0 is not supported, only one number"),
        "llama.rope.dimension_count": (8, "rope.dimension_count=8 is not supported, only 16, the"),
        "tokenizer.ggml.tokens": ([], "a.gguf has no tokenizer.ggml.tokens"),
    }
    for name, (value, message) in refused.items():
        is_refused(message, gguf_file.read_sizes, "a.gguf", make_entries(**{name: value}))
    for name in ("model", "pre", "merges"):
        entries = make_entries()
        del entries[f"tokenizer.ggml.{name}"]
        sizes = gguf_file.read_sizes("a.gguf", entries)
        message = f"a.gguf has no tokenizer.ggml.{name}: its tokenizer is unknown"
        is_refused(message, gguf_file.check_entries, "a.gguf", entries, sizes)


REFUSED = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 8,
    "llama.rope.dimension_count": 8,
    "llama.attention.value_length": 8,
    "llama.attention.sliding_window": 4,
    "llama.attention.scale": 0.5,
    "llama.expert_count": 8,
    "llama.logit_scale": 2.0,
    "llama.attention.head_count_kv": [2, 1],
    "general.architecture": "qwen2",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.add_bos_token": True,
    "split.count": 2,
    "a.new_entry": 1,
}
ABSENT = ["llama.embedding_length", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.pre"]


@pytest.mark.parametrize("name", [*REFUSED, *ABSENT])
def test_what_a_gguf_file_says_and_is_not_read_is_named(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(gguf, tmp_path / "model.gguf", draw_tensors(), **{name: REFUSED.get(name)})
    value = f"{re.escape(repr(REFUSED[name]))} is not supported" if name in REFUSED else ""
    message = rf"{re.escape(name)}={value}" if value else rf"model\.gguf has no {re.escape(name)}"
    is_refused(message, gguf_file.from_gguf, tmp_path / "model.gguf", tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight"]
)
def test_a_tensor_of_a_gguf_file_that_is_not_read_is_named(name, tmp_path):
    gguf = pytest.importorskip("gguf")
    tensors = draw_tensors() | {name: np.ones(8, np.float32)}
    write_gguf(gguf, tmp_path / "model.gguf", tensors)
    message = rf"tensor '{re.escape(name)}' is not supported"
    is_refused(message, gguf_file.from_gguf, tmp_path / "model.gguf", tmp_path)


def test_an_entry_or_a_tensor_that_begins_like_another_is_not_that_one():
    entries = make_entries(**{"tokenizer.ggml.tokens_of_another": 1})
    sizes = gguf_file.read_sizes("a.gguf", entries)
    with pytest.raises(ValueError, match="tokens_of_another=1 is not supported"):
        gguf_file.check_entries("a.gguf", entries, sizes)
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.attn_q\.weight_scale' is not supported"):
        gguf_file._name_tensor("a.gguf", "blk.0.attn_q.weight_scale")


def test_a_tensor_that_cannot_be_dequantised_is_named(monkeypatch, tmp_path):
    def dequantize(data, kind):
        raise NotImplementedError("no\nmethod")

    fields = {n: SimpleNamespace(contents=lambda v=v: v) for n, v in make_entries().items()}
    tensor = SimpleNamespace(name="blk.0.attn_q.weight", data=None, tensor_type=None)
    reader = SimpleNamespace(fields=fields, tensors=[tensor])
    library = SimpleNamespace(GGUFReader=lambda path: reader, dequantize=dequantize)
    monkeypatch.setattr(gguf_file, "import_package", lambda *names: library)
    with pytest.raises(ValueError, match=r"^a\.gguf: tensor blk\.0\.attn_q\.weight: no.*method$"):
        gguf_file.from_gguf("a.gguf", tmp_path)


def test_digits_are_split_before_spaces_are_joined(tmp_path):
    """As the tokenizer of SmolLM: two spaces before a number are one piece."""
    tokenizers = pytest.importorskip("tokenizers")
    gguf_file._write_tokenizer(make_entries(), tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a  12")]
    assert pieces == ["a", "ĠĠ", "1", "2"]
