"""Random Llama checkpoints of any size in bfloat16, as Hugging Face saves them: what is streamed.

Weights are normal(0, 0.02) out of a pool of four million draws, which every tensor reads from
another place on: drawing seven billion numbers again would take minutes and change nothing that is
measured of speed and memory.
"""

import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

POOL = 1 << 22
SIZES = {
    "tiny": (4, 64, 176, 4, 2, 128),
    "1.1b": (22, 2048, 5632, 32, 4, 32000),
    "7b": (32, 4096, 11008, 32, 32, 32000),
}
# Too large to be made here; `cost_model` computes what they would take.
PUBLISHED = SIZES | {
    "70b": (80, 8192, 28672, 64, 8, 128256),
    "405b": (126, 16384, 53248, 128, 8, 128256),
}


def make(folder: Path, size: str) -> None:
    """Writes the checkpoint, a shard for each layer, unless it is there already."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    depth, d, f, h, groups, vocab = SIZES[size]
    k = groups * d // h
    layer = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (k, d),
        "self_attn.v_proj": (k, d),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }
    ends = {"model.embed_tokens": (vocab, d), "model.norm": (d,), "lm_head": (vocab, d)}
    shards = [ends] + [{f"model.layers.{l}.{n}": s for n, s in layer.items()} for l in range(depth)]
    draws = np.random.default_rng(0).standard_normal(POOL, np.float32)
    pool = (0.02 * draws).astype(ml_dtypes.bfloat16)
    files = {}
    for i, shapes in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shapes = {f"{n}.weight": s for n, s in shapes.items()}
        save_file({n: tensor_of(n, s, pool) for n, s in shapes.items()}, folder / name)
        files |= dict.fromkeys(shapes, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {
        "model_type": "llama",
        "num_hidden_layers": depth,
        "hidden_size": d,
        "intermediate_size": f,
        "num_attention_heads": h,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(settings))


def tensor_of(name: str, shape: tuple[int, ...], pool: np.ndarray) -> np.ndarray:
    """A tensor out of the pool, from a place that its name gives; vectors, norms' gains, are 1."""
    if len(shape) == 1:
        return np.ones(shape, pool.dtype)
    return np.resize(np.roll(pool, -(zlib.crc32(name.encode()) % len(pool))), shape)
