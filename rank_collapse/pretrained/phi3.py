"""Phi-3 (Abdin et al. 2024): Llama with fused maps, some features unrotated, LongRoPE."""

from typing import Any

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.rotary import rotary_entry, rotary_fields
from rank_collapse.pretrained.weights import Weights

DEFAULTS = decoder.DEFAULTS | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 32000,
}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    entry = dict(rotary_entry(settings))
    if entry.get("rope_type", entry.get("type")) in ("su", "yarn"):  # what early files call it
        entry["rope_type"] = "longrope"
    width = settings["head_dim"] or settings["hidden_size"] // settings["num_attention_heads"]
    share = settings["partial_rotary_factor"]
    return decoder.decoder_config(settings, **rotary_fields(entry, settings, width, share=share))


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters; `qkv_proj` and `gate_up_proj` hold several maps in a row."""
    d, f, h, k = config.d_model, config.d_ff, config.num_heads, config.qk_width
    groups = decoder.groups_of(settings)

    def attention(name):
        joint = weights.take(f"{name}.self_attn.qkv_proj.weight", (h + 2 * groups) * k, d)
        joint = joint.reshape(h + 2 * groups, k, d).transpose(0, 2, 1)
        w_o, b_o = weights.heads_out(f"{name}.self_attn.o_proj", d, h, k, False)
        return AttentionParams(
            w_q=joint[:h], w_k=joint[h : h + groups], w_v=joint[h + groups :], w_o=w_o, b_o=b_o
        )

    def mlp(name):
        joint = weights.take(f"{name}.mlp.gate_up_proj.weight", 2 * f, d).T
        w_out, b_out = weights.linear(f"{name}.mlp.down_proj", f, d, False)
        return MLPParams(w_in=joint[:, f:], w_out=w_out, b_out=b_out, w_gate=joint[:, :f])

    return decoder.pre_norm_params(weights, config, attention, mlp)


PHI3 = decoder.family("phi3", DEFAULTS, config, params)
