"""OLMo 2 (OLMo Team 2024): RMSNorm of what each branch puts out, QK-norm over all heads."""

from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.weights import Weights

DEFAULTS = decoder.DEFAULTS | {
    "vocab_size": 50304,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    return decoder.decoder_config(settings, norm_placement="branch", qk_norm="width")


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    d, groups, bias = config.d_model, decoder.groups_of(settings), settings["attention_bias"]

    def norm(name):
        return weights.norm(name, d, bias=False)

    def layer(name):
        return BlockParams(
            attention=decoder.attention(
                weights, f"{name}.self_attn", config, groups, into=bias, out=bias
            ),
            attention_branch_norm=norm(f"{name}.post_attention_layernorm"),
            mlp=decoder.mlp(weights, f"{name}.mlp", d, config.d_ff),
            mlp_branch_norm=norm(f"{name}.post_feedforward_layernorm"),
        )

    return decoder.decoder_params(weights, config, layer, norm)


OLMO2 = decoder.family("olmo2", DEFAULTS, config, params)
