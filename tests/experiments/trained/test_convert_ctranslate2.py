"""Files of CTranslate2, against what `transformers` makes of the same weights."""

import struct
import warnings

import numpy as np
import pytest

import rank_collapse as rc
from experiments.trained import convert
from rank_collapse import pretrained
from tests.support.closeness import assert_close

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")

    from tests.oracles import architectures


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


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
    assert_close(hidden, torch.stack(states, dim=1)[0].numpy(), atol=2e-5)
