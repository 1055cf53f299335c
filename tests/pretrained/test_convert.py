"""Files of llama.cpp and CTranslate2 against what `transformers` makes of the same weights."""

import struct
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import architectures
    import transformers

import rank_collapse as rc
from experiments.paper.trained import convert
from rank_collapse import pretrained
from rank_collapse.text import encoders

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WORDS = ["a", "b", "1", "2", "Ġ", "ab", "Ġa"]


def write_gguf(gguf, path, kind):
    """A random Llama of two layers, 4 heads and 2 groups of keys, quantised in parts."""
    draw, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(16)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b", "Ġ a"])
    shapes = {"token_embd": (len(WORDS), 64), "output_norm": (64,)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_{k}": (64 if k in "qoutput" else 32, 64) for k in ("q", "k", "v")}
        shapes |= {f"blk.{i}.attn_output": (64, 64), f"blk.{i}.ffn_down": (64, 96)}
        shapes |= {f"blk.{i}.ffn_gate": (96, 64), f"blk.{i}.ffn_up": (96, 64)}
        shapes |= {f"blk.{i}.{norm}_norm": (64,) for norm in ("attn", "ffn")}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape).astype(np.float32) * 0.2
        if len(shape) == 2 and name.startswith("blk"):
            quantised = gguf.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", quantised, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_gguf_file_is_the_llama_that_transformers_reads(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(gguf, path, gguf.GGMLQuantizationType[kind])
    convert.from_gguf(path, tmp_path)
    config, params = pretrained.load(tmp_path)
    ids = np.array([0, 5, 2, 6, 3, 1])
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    with torch.no_grad():
        states = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    expected = torch.cat(states).numpy()
    np.testing.assert_allclose(rc.apply(params, ids, config).hidden_states, expected, atol=2e-5)
    encode = encoders.load_tokenizer(tmp_path, pretrained.settings_of(tmp_path))
    assert [WORDS[i] for i in encode("ab a12")] == ["ab", "Ġa", "1", "2"]


def dump_ctranslate2(model, heads):
    """Dumps a Whisper's encoder as a model.bin with the tensor names of CTranslate2's converter."""
    state = {n: a.numpy() for n, a in model.state_dict().items()}
    tensors = {
        "encoder/position_encodings/encodings": state["embed_positions.weight"],
        "encoder/num_heads": np.array(heads, np.int16),
        "decoder/layer_norm/gamma": np.ones(3, np.float32),
    }

    def put(place, name, norm=False):
        for suffix, kind in zip(
            ("gamma", "beta") if norm else ("weight", "bias"), ("weight", "bias"), strict=True
        ):
            tensors[f"encoder/{place}/{suffix}"] = state[f"{name}.{kind}"]

    for conv in ("conv1", "conv2"):
        put(conv, conv)
    put("layer_norm", "layer_norm", norm=True)
    for i in range(model.config.encoder_layers):
        layer, place = f"layers.{i}", f"layer_{i}"
        state[f"{layer}.self_attn.k_proj.bias"] = np.ones(model.config.d_model, np.float32)
        for kind in ("weight", "bias"):
            parts = [state[f"{layer}.self_attn.{k}_proj.{kind}"] for k in "qkv"]
            tensors[f"encoder/{place}/self_attention/linear_0/{kind}"] = np.concatenate(parts)
        put(f"{place}/self_attention/linear_1", f"{layer}.self_attn.out_proj")
        put(f"{place}/self_attention/layer_norm", f"{layer}.self_attn_layer_norm", norm=True)
        put(f"{place}/ffn/linear_0", f"{layer}.fc1")
        put(f"{place}/ffn/linear_1", f"{layer}.fc2")
        put(f"{place}/ffn/layer_norm", f"{layer}.final_layer_norm", norm=True)

    def pack_text(name):
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    out = struct.pack("<I", 6) + pack_text("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    for name, a in tensors.items():
        number = {np.dtype(kind): i for i, kind in enumerate(convert._DTYPES)}[a.dtype]
        out += pack_text(name) + struct.pack(f"<B{a.ndim}IBI", a.ndim, *a.shape, number, a.nbytes)
        out += a.tobytes()
    return out


def test_a_ctranslate2_file_is_the_encoder_of_transformers(tmp_path):
    sizes = {"d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 3, "num_mel_bins": 5}
    sizes |= {"encoder_ffn_dim": 20, "max_source_positions": 6, "decoder_layers": 1}
    whisper = architectures.build(architectures.Case("WhisperModel", sizes))
    model = whisper.get_encoder()
    (tmp_path / "model.bin").write_bytes(dump_ctranslate2(model, 3))
    convert.from_ctranslate2(tmp_path / "model.bin", tmp_path)
    config, params = pretrained.load(tmp_path)
    features = architectures.inputs(whisper)["input_features"]
    with torch.no_grad():
        states = model(torch.from_numpy(features), output_hidden_states=True).hidden_states
    hidden = rc.apply(params, features[0].T, config).hidden_states
    np.testing.assert_allclose(hidden, torch.stack(states, dim=1)[0].numpy(), atol=2e-5)
