"""XLNet (Yang et al. 2019), content stream: relative attention with two biases and segments.

Without segments given, the segment term is absent, as in the published code. Permutation masks
and memories of earlier segments are left out: they belong to its pretraining.
"""

from typing import Any

import numpy as np

from rank_collapse.network.attention import AttentionParams, RelativeParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("word_embedding.weight",)
DEFAULTS = {
    "vocab_size": 32000,
    "d_model": 1024,
    "n_layer": 24,
    "n_head": 16,
    "d_inner": 4096,
    "ff_activation": "gelu",
    "attn_type": "bi",
    "bi_data": False,
    "clamp_len": -1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    if settings["bi_data"]:
        raise ValueError("bi_data=True of an xlnet model is not supported")
    if settings["attn_type"] not in ("bi", "uni"):
        raise ValueError(f"attn_type={settings['attn_type']!r} is not 'bi' or 'uni'")
    d = settings["d_model"]
    return TransformerConfig(
        depth=settings["n_layer"],
        num_heads=settings["n_head"],
        d_model=d,
        d_ff=settings["d_inner"],
        mlp=activation(settings["ff_activation"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="post",
        norm_eps=settings["layer_norm_eps"],
        mask="causal" if settings["attn_type"] == "uni" else "none",
        position="relative_key",
        clamp_distance=max(settings["clamp_len"], 0),
        init="bert",
        embedding=EmbeddingConfig(vocab_size=settings["vocab_size"], d_embed=d, norm=False),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors, whose maps are stored [d, h, k]."""
    d, h, k = config.d_model, config.num_heads, config.qk_width
    weights.check_depth("layer.{}", config.depth)

    def layer(i):
        name = f"layer.{i}"

        def table(letter):
            return weights.take(f"{name}.rel_attn.{letter}", d, h, k).transpose(1, 0, 2)

        def bias(letters):
            return weights.take(f"{name}.rel_attn.{letters}", h, k)

        zero = np.zeros((h, k), weights.dtype)
        return BlockParams(
            attention=AttentionParams(
                w_q=table("q"), b_q=bias("r_w_bias"), w_k=table("k"), b_k=zero,
                w_v=table("v"), b_v=zero, w_o=table("o").transpose(0, 2, 1),
                b_o=np.zeros(d, weights.dtype),
                relative=RelativeParams(
                    w_r=table("r"), b_r=bias("r_r_bias"), b_s=bias("r_s_bias"),
                    segment=weights.take(f"{name}.rel_attn.seg_embed", 2, h, k),
                ),
            ),
            attention_norm=weights.norm(f"{name}.rel_attn.layer_norm", d),
            mlp=weights.mlp(f"{name}.ff.layer_1", f"{name}.ff.layer_2", d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.ff.layer_norm", d),
        )  # fmt: skip

    tokens = weights.table("word_embedding.weight", config.embedding.vocab_size, d)
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        embedding=weights.to_device(EmbeddingParams(tokens=tokens)),
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range), the biases of the relative attention too."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "layer_norm" in name:
        return Draw(value=1.0)
    return Draw(std=settings["initializer_range"])


XLNET = Family("xlnet", DEFAULTS, ANCHORS, config, params, draw)
