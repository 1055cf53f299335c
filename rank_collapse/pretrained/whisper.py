"""Whisper's encoder (Radford et al. 2023): two convolutions over a log-mel spectrogram, pre-norm.

The network's input is the spectrogram, [frames, mel bins].
"""

from typing import Any

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.decoder import only
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("conv1.weight",)
DEFAULTS = {
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "activation_function": "gelu",
    "d_model": 384,
    "init_std": 0.02,
    "max_source_positions": 1500,
    "scale_embedding": False,
}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes, the encoder alone.

    Raises:
        ValueError: A variant that is not supported.
    """
    only(settings, "activation_function", "gelu")  # the convolutions' too
    d = settings["d_model"]
    return TransformerConfig(
        depth=settings["encoder_layers"],
        num_heads=settings["encoder_attention_heads"],
        d_model=d,
        d_ff=settings["encoder_ffn_dim"],
        mlp=activation(settings["activation_function"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        norm_eps=1e-5,
        final_norm=True,
        init="bert",
        embedding=EmbeddingConfig(
            d_input=settings["num_mel_bins"],
            d_embed=d,
            convolutions=True,
            positions="learned",
            num_positions=settings["max_source_positions"],
            norm=False,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors; keys have no bias."""
    d, h, k = config.d_model, config.num_heads, config.qk_width
    weights.check_depth("layers.{}", config.depth)

    def attention(name):
        names = tuple(f"{name}.{part}_proj" for part in "qkv")
        w_q, b_q = weights.heads_in(names[0], d, h, k)
        w_k, b_k = weights.heads_in(names[1], d, h, k, False)
        w_v, b_v = weights.heads_in(names[2], d, h, k)
        w_o, b_o = weights.heads_out(f"{name}.out_proj", d, h, k)
        return AttentionParams(
            w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
        )

    def layer(i):
        name = f"layers.{i}"
        return BlockParams(
            attention=attention(f"{name}.self_attn"),
            attention_norm=weights.norm(f"{name}.self_attn_layer_norm", d),
            mlp=weights.mlp(f"{name}.fc1", f"{name}.fc2", d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.final_layer_norm", d),
        )

    def convolution(name, width):
        """[3, width, d] and [d]: torch keeps the three steps of time last."""
        kernel = weights.take(f"{name}.weight", d, width, 3).transpose(2, 1, 0)
        return kernel, weights.take(f"{name}.bias", d)

    (w_in, b_in), (w_hidden, b_hidden) = (
        convolution("conv1", settings["num_mel_bins"]),
        convolution("conv2", d),
    )
    rows = weights.take("embed_positions.weight", config.embedding.num_positions, d)
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm("layer_norm", d)),
        embedding=weights.to_device(
            EmbeddingParams(
                w_in=w_in, b_in=b_in, w_hidden=w_hidden, b_hidden=b_hidden, positions=rows
            )
        ),
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, init_std); zero biases, unit gains."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "layer_norm" in name:
        return Draw(value=1.0)
    return Draw(std=settings["init_std"])


WHISPER = Family("whisper", DEFAULTS, ANCHORS, config, params, draw)
