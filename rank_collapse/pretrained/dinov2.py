"""DINOv2 (Oquab et al. 2024), with registers too (Darcet et al. 2024): ViT with LayerScale.

The gains of LayerScale (Touvron et al. 2021) are the network's learned branch gains.
"""

import dataclasses
from typing import Any

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.gains import LearnedGains
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained import vit
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-6,
    "image_size": 224,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "layerscale_value": 1.0,
    "use_swiglu_ffn": False,
}
# Queries, keys, values and output of layer i: in older files, and in those of transformers >= 5.
_OLD = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
_OLD += ("attention.output.dense",)
_NEW = tuple(f"attention.{letter}_proj" for letter in "qkvo")


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: Patches that do not tile the image, or are not square.
    """
    d, (count, size) = settings["hidden_size"], vit.num_patches(settings)
    f = int(d * settings["mlp_ratio"])
    swiglu = settings["use_swiglu_ffn"]
    return TransformerConfig(
        depth=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        d_model=d,
        # Two thirds, up to a multiple of eight: as many parameters as without a gate.
        d_ff=(int(f * 2 / 3) + 7) // 8 * 8 if swiglu else f,
        mlp="swiglu" if swiglu else activation(settings["hidden_act"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        norm_eps=settings["layer_norm_eps"],
        final_norm=True,
        init="bert",
        learned_branch_gain=settings["layerscale_value"],
        learned_per_feature=True,
        embedding=EmbeddingConfig(
            d_input=settings["num_channels"] * size * size,
            d_embed=d,
            positions="learned",
            num_positions=count + 1,
            class_token=True,
            num_registers=settings.get("num_register_tokens", 0),
            norm=False,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    d, h, k, bias = config.d_model, config.num_heads, config.qk_width, settings["qkv_bias"]
    weights.check_depth("encoder.layer.{}", config.depth)
    names = _OLD if weights.has(f"encoder.layer.0.{_OLD[0]}.weight") else _NEW

    def attention(name):
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
            weights.heads_in(f"{name}.{part}", d, h, k, bias) for part in names[:3]
        )
        w_o, b_o = weights.heads_out(f"{name}.{names[3]}", d, h, k)
        return AttentionParams(
            w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
        )

    def gains(name):
        return LearnedGains(branch=weights.take(f"{name}.lambda1", d))

    def layer(i):
        name = f"encoder.layer.{i}"
        return BlockParams(
            attention=attention(name),
            attention_norm=weights.norm(f"{name}.norm1", d),
            attention_gains=gains(f"{name}.layer_scale1"),
            mlp=_mlp(weights, f"{name}.mlp", config),
            mlp_norm=weights.norm(f"{name}.norm2", d),
            mlp_gains=gains(f"{name}.layer_scale2"),
        )

    registers = None
    if count := config.embedding.num_registers:
        registers = weights.take("embeddings.register_tokens", 1, count, d)[0]
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm("layernorm", d)),
        embedding=vit.patch_embedding(weights, settings, config.embedding, registers),
    )


def _mlp(weights, name, config):
    d, f = config.d_model, config.d_ff
    if config.mlp != "swiglu":
        return weights.mlp(f"{name}.fc1", f"{name}.fc2", d, f)
    if weights.has(f"{name}.weights_in.weight"):
        w, b = weights.linear(f"{name}.weights_in", d, 2 * f)
        w_gate, w_in, b_gate, b_in = w[:, :f], w[:, f:], b[:f], b[f:]
        w_out, b_out = weights.linear(f"{name}.weights_out", f, d)
    else:
        w_gate, b_gate = weights.linear(f"{name}.gate_proj", d, f)
        w_in, b_in = weights.linear(f"{name}.up_proj", d, f)
        w_out, b_out = weights.linear(f"{name}.down_proj", f, d)
    return MLPParams(w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out, w_gate=w_gate, b_gate=b_gate)


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range) cut at two units; the gains of LayerScale as they start."""
    if name.endswith((".bias", "register_tokens")):
        return Draw(value=0.0)
    if name.endswith("lambda1"):
        return Draw(value=settings["layerscale_value"])
    if "norm" in name:
        return Draw(value=1.0)
    return Draw(std=settings["initializer_range"], truncate=True)


DINOV2 = Family("dinov2", DEFAULTS, vit.ANCHORS, config, params, draw, kinds=vit.KINDS)
DINOV2_REGISTERS = dataclasses.replace(
    DINOV2,
    model_type="dinov2_with_registers",
    defaults=DEFAULTS | {"patch_size": 16, "num_register_tokens": 4},
)
