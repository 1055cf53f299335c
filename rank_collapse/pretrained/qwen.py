"""Qwen2 (Yang et al. 2024) and Qwen3 (Yang et al. 2025): Llama with biases, or with QK-norm."""

import dataclasses
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.parameters import TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.weights import Weights

DEFAULTS = decoder.DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
}


def windows(settings: dict[str, Any]) -> tuple[int, ...]:
    """The last layers look at a window, where the model uses one."""
    limit = (settings["sliding_window"] or 4096) if settings["use_sliding_window"] else None
    local = [i >= settings["max_window_layers"] for i in range(settings["num_hidden_layers"])]
    return decoder.windows_of(settings, local, limit and limit - 1)


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    return decoder.decoder_config(settings, windows=windows(settings))


def _qwen3_config(settings):
    """Qwen3 normalises queries and keys of each head."""
    return decoder.decoder_config(settings, windows=windows(settings), qk_norm="head")


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """Qwen2 has biases on queries, keys and values and none behind them; its config is silent."""
    groups = decoder.groups_of(settings)
    return decoder.pre_norm_params(
        weights,
        config,
        lambda name: attention(weights, f"{name}.self_attn", settings, config, groups),
        lambda name: decoder.mlp(weights, f"{name}.mlp", config.d_model, config.d_ff),
    )


def attention(
    weights: Weights, name: str, settings: dict[str, Any], config: TransformerConfig, groups: int
) -> Any:
    """Attention of a layer of Qwen2, or of Qwen3 where queries and keys are normalised."""
    if config.qk_norm == "none":
        bias = settings.get("qkv_bias", True)
        return decoder.attention(weights, name, config, groups, into=bias)
    bias = settings["attention_bias"]
    return decoder.attention(weights, name, config, groups, into=bias, out=bias)


QWEN2 = decoder.family("qwen2", DEFAULTS, config, params)
QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    defaults=DEFAULTS | {"head_dim": 128, "attention_bias": False},
    config=_qwen3_config,
)
