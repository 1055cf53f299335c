"""A Llama in a GGUF file of llama.cpp as a checkpoint folder.

Unknown entries of the file are refused by name, because a Llama with YaRN or with experts would be
read as another network. Keys: github.com/ggml-org/ggml, docs/gguf.md.
"""

import os
import re
from pathlib import Path

import numpy as np

from experiments.lab import JsonObject
from experiments.trained.convert import write_checkpoint
from rank_collapse.checks import refuse_if
from rank_collapse.extras import import_package
from rank_collapse.printed import format_one_line, quote_value

ARCHITECTURE = "llama"
# config.json → the file's entry, after "llama."
_SIZES = {
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
_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_THETA = 10000.0  # of llama.cpp where the file has none
# Entries of which one value is read, as it changes nothing; any other is refused.
_NEUTRAL = {
    f"{ARCHITECTURE}.rope.scaling.type": "none",
    f"{ARCHITECTURE}.rope.scaling.factor": 1.0,
    f"{ARCHITECTURE}.rope.scale_linear": 1.0,
    f"{ARCHITECTURE}.attention.causal": True,
    f"{ARCHITECTURE}.expert_count": 0,
    f"{ARCHITECTURE}.expert_used_count": 0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",  # which splits numbers into digits
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "split.count": 1,
}
# Entries that say nothing of the states: names, quantisation, ids of special tokens, templates.
_IGNORED = re.compile(
    r"GGUF\..*|general\.(?!architecture).*|quantize\..*|split\.(no|tensors\.count)"
    r"|tokenizer\.ggml\.(tokens|token_type|scores|merges|\w+_token_id)|tokenizer\.chat_template.*"
)
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
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.weight")


def from_gguf(path: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Writes a Llama of llama.cpp as a checkpoint: weights in float32, its tokenizer as a file.

    Args:
        path: A .gguf file.
        folder: Folder for config.json, model.safetensors and tokenizer.json.

    Raises:
        ValueError: Another architecture, or an unknown entry or tensor, which the message names.
    """
    gguf = import_package("gguf", str(path), "gguf")
    reader = gguf.GGUFReader(path)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    config = read_sizes(path, entries)
    check_entries(path, entries, config)
    tensors = {}
    for tensor in reader.tensors:
        name, kind = _name_tensor(path, tensor.name)
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            text = f"{path}: tensor {tensor.name}: {format_one_line(error, 200)}"
            raise ValueError(text) from None
        if kind in ("attn_q", "attn_k"):  # neighbouring features are rotated there
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            halves = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2)
            values = halves.reshape(values.shape)
        tensors[name] = values
    tied = "lm_head.weight" not in tensors
    config |= {"model_type": "llama", "tie_word_embeddings": tied}
    write_checkpoint(folder, config, tensors)
    _write_tokenizer(entries, Path(folder) / "tokenizer.json")


def read_sizes(path: str | os.PathLike, entries: JsonObject) -> JsonObject:
    """Reads the sizes of the network, as config.json names them.

    Args:
        path: Path of the file, for messages.
        entries: Entries of its header.

    Raises:
        ValueError: Another architecture; a size that is missing or not a size.
    """
    architecture = entries.get("general.architecture")
    text = f"{path}: general.architecture={quote_value(architecture)} is not supported, only"
    refuse_if(architecture != ARCHITECTURE, f"{text} {ARCHITECTURE!r}")
    words = entries.get("tokenizer.ggml.tokens")
    refuse_if(not words, f"{path} has no tokenizer.ggml.tokens")
    defaults = {"rope.freq_base": _THETA, "vocab_size": len(words)}
    defaults["attention.head_count_kv"] = entries.get(f"{ARCHITECTURE}.attention.head_count")
    sizes = {}
    for name, key in (*_SIZES.items(), *((key, key) for key in _WIDTHS)):
        full = f"{ARCHITECTURE}.{key}"
        value = entries.get(full, defaults.get(key))
        refuse_if(value is None and key not in _WIDTHS, f"{path} has no {full}")
        is_size = value is None or (isinstance(value, int | float) and value > 0)
        refuse_if(
            not is_size,
            f"{path}: {full}={quote_value(value)} is not supported, only one number above 0",
        )
        sizes[name] = value
    width = sizes["attention.key_length"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    for key in _WIDTHS:
        value = sizes.pop(key)
        only = f"only {width}, the width of a head"
        text = f"{path}: {ARCHITECTURE}.{key}={value} is not supported, {only}"
        refuse_if(value not in (None, width), text)
    return sizes | {"head_dim": width}


def check_entries(path: str | os.PathLike, entries: JsonObject, config: JsonObject) -> None:
    """Check that no entry of a file's header would be dropped.

    Args:
        path: Path of the file, for messages.
        entries: Entries of its header.
        config: Configuration from `read_sizes`.

    Raises:
        ValueError: The message names the first unknown entry and its value.
    """
    read = {f"{ARCHITECTURE}.{key}" for key in (*_SIZES.values(), *_WIDTHS)}
    for name in ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges"):
        refuse_if(name not in entries, f"{path} has no {name}: its tokenizer is unknown")
    for name, value in entries.items():
        if name in read or name == "general.architecture" or _IGNORED.fullmatch(name):
            continue
        only = f", only {_NEUTRAL[name]!r}" if name in _NEUTRAL else ""
        is_neutral = name in _NEUTRAL and value == _NEUTRAL[name]
        refuse_if(not is_neutral, f"{path}: {name}={quote_value(value)} is not supported{only}")


def _name_tensor(path, name):
    """Returns (name in transformers, kind) of a tensor.

    Raises:
        ValueError: The tensor does not belong to a Llama, such as a bias or factors of the
            rotation.
    """
    match = _TENSOR.fullmatch(name)
    layer, kind = match.groups() if match else (None, "")
    names = _OUTSIDE if layer is None else _LAYER
    refuse_if(kind not in names, f"{path}: tensor {quote_value(name)} is not supported")
    place = "" if layer is None else f"model.layers.{layer}."
    return f"{place}{names[kind]}.weight", kind


def _write_tokenizer(entries, path):
    """Writes the tokenizer of a GGUF file: byte-level BPE that splits numbers into digits."""
    tokenizers = import_package("tokenizers", str(path), "pretrained")
    words = {word: i for i, word in enumerate(entries["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in entries["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
    split = tokenizers.pre_tokenizers
    digits, level = split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = split.Sequence([digits, level])
    tokenizer.save(str(path))
