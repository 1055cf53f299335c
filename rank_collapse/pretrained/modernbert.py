"""ModernBERT (Warner et al. 2024): an encoder with rotary positions, GeGLU and local windows."""

import math
from typing import Any

import jax
import numpy as np

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.layers import MLPParams, NormParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.decoder import gated, windows_of
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.rotary import rotary_entry, rotary_fields
from rank_collapse.pretrained.weights import Draw, Weights

ANCHORS = ("embeddings.tok_embeddings.weight",)
DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "layer_types": None,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "pad_token_id": 50283,
}
KINDS = {"rope_theta": (float,), "rope_scaling": (dict,), "rope_parameters": (dict,)}
KINDS |= {"layer_types": (list,)}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    d, depth, eps = settings["hidden_size"], settings["num_hidden_layers"], settings["norm_eps"]
    every = settings["global_attn_every_n_layers"]
    local = [bool(i % every) for i in range(depth)]
    fields = {}
    for kind, name in (("full_attention", "global"), ("sliding_attention", "local")):
        entry = {"rope_theta": settings[f"{name}_rope_theta"]} | rotary_entry(settings, kind)
        if entry.get("rope_type", "default") != "default":
            raise ValueError(
                f"rope_type={entry['rope_type']!r} of a modernbert model is not supported, only "
                "'default'"
            )
        fields[name] = rotary_fields(entry, settings, d // settings["num_attention_heads"])
    return TransformerConfig(
        depth=depth,
        num_heads=settings["num_attention_heads"],
        d_model=d,
        d_ff=settings["intermediate_size"],
        mlp=gated(settings, "hidden_activation"),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        first_norm=False,
        norm_eps=eps,
        final_norm=True,
        windows=windows_of(settings, local, settings["local_attention"] // 2),
        local_theta=fields["local"]["rotary_theta"],
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=d,
            num_positions=settings["max_position_embeddings"],
            norm_eps=eps,
        ),
        **fields["global"],
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors; maps of one input are fused."""
    d, f, h, k = config.d_model, config.d_ff, config.num_heads, config.qk_width
    in_attention, in_mlp = settings["attention_bias"], settings["mlp_bias"]
    weights.check_depth("layers.{}", config.depth)

    def norm(name):
        own = weights.norm(name, d, bias=settings["norm_bias"])
        # Of one dtype with those of the first layer, which no file has.
        return jax.tree.map(lambda a: np.asarray(a, weights.dtype), own)

    def attention(name):
        w = weights.take(f"{name}.Wqkv.weight", 3 * d, d).reshape(3, h, k, d)
        w_q, w_k, w_v = w.transpose(0, 1, 3, 2)
        b_q = b_k = b_v = None
        if in_attention:
            b_q, b_k, b_v = weights.take(f"{name}.Wqkv.bias", 3 * d).reshape(3, h, k)
        w_o, b_o = weights.heads_out(f"{name}.Wo", d, h, k, in_attention)
        return AttentionParams(
            w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
        )

    def mlp(name):
        w, b = weights.linear(f"{name}.Wi", d, 2 * f, in_mlp)
        b_gate, b_in = (None, None) if b is None else (b[:f], b[f:])
        w_out, b_out = weights.linear(f"{name}.Wo", f, d, in_mlp)
        return MLPParams(
            w_in=w[:, f:], b_in=b_in, w_out=w_out, b_out=b_out, w_gate=w[:, :f], b_gate=b_gate
        )

    def layer(i):
        name = f"layers.{i}"
        # The first layer has no norm before its attention, and none is stored: see `first_norm`.
        none = NormParams(
            gain=np.ones(d, weights.dtype),
            bias=np.zeros(d, weights.dtype) if settings["norm_bias"] else None,
        )
        return BlockParams(
            attention=attention(f"{name}.attn"),
            attention_norm=norm(f"{name}.attn_norm") if i else none,
            mlp=mlp(f"{name}.mlp"),
            mlp_norm=norm(f"{name}.mlp_norm"),
        )

    tokens = weights.table(ANCHORS[0], config.embedding.vocab_size, d)
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(norm("final_norm")),
        embedding=weights.to_device(EmbeddingParams(tokens=tokens, norm=norm("embeddings.norm"))),
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range) cut at two units, over √(2 layers) at the end of branches."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "norm" in name:
        return Draw(value=1.0)
    std = settings["initializer_range"]
    if name.endswith("Wo.weight"):
        std = std / math.sqrt(2 * settings["num_hidden_layers"])
    return Draw(std=std, truncate=True)


MODERNBERT = Family("modernbert", DEFAULTS, ANCHORS, config, params, draw, kinds=KINDS)
