"""DistilBERT (Sanh et al. 2019): BERT without segments, under other names."""

from typing import Any

import numpy as np

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("embeddings.word_embeddings.weight",)
DEFAULTS = {
    "vocab_size": 30522,
    "dim": 768,
    "n_layers": 6,
    "n_heads": 12,
    "hidden_dim": 3072,
    "activation": "gelu",
    "max_position_embeddings": 512,
    "sinusoidal_pos_embds": False,
    "initializer_range": 0.02,
    "pad_token_id": 0,
}
_EPS = 1e-12  # fixed in the published model, not an entry of its config


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes."""
    return TransformerConfig(
        depth=settings["n_layers"],
        num_heads=settings["n_heads"],
        d_model=settings["dim"],
        d_ff=settings["hidden_dim"],
        mlp=activation(settings["activation"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="post",
        norm_eps=_EPS,
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=settings["dim"],
            positions="learned",
            num_positions=settings["max_position_embeddings"],
            norm_eps=_EPS,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    d, tables = config.d_model, config.embedding
    weights.check_depth("transformer.layer.{}", config.depth)

    def layer(i):
        name = f"transformer.layer.{i}"
        parts = [f"{name}.attention.{p}_lin" for p in ("q", "k", "v", "out")]
        return BlockParams(
            attention=weights.attention(tuple(parts), config),
            attention_norm=weights.norm(f"{name}.sa_layer_norm", d),
            mlp=weights.mlp(f"{name}.ffn.lin1", f"{name}.ffn.lin2", d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.output_layer_norm", d),
        )

    position_name = "embeddings.position_embeddings.weight"
    positions = weights.take(position_name, tables.num_positions, d)
    if weights.drawn and settings["sinusoidal_pos_embds"]:
        positions = _interleaved_sinusoids(tables.num_positions, d)
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        embedding=weights.to_device(
            EmbeddingParams(
                tokens=weights.table("embeddings.word_embeddings.weight", tables.vocab_size, d),
                positions=positions,
                norm=weights.norm("embeddings.LayerNorm", d),
            )
        ),
    )


def _interleaved_sinusoids(rows, width):
    angles = np.arange(rows)[:, None] * 10000.0 ** (-2 * (np.arange(width) // 2) / width)[None, :]
    return np.where(np.arange(width)[None, :] % 2 == 0, np.sin(angles), np.cos(angles))


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range); zero biases, unit gains, a zero row for padding."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "norm" in name.lower():
        return Draw(value=1.0)
    padded = name.endswith("word_embeddings.weight")
    return Draw(
        std=settings["initializer_range"], zero_row=settings["pad_token_id"] if padded else None
    )


DISTILBERT = Family("distilbert", DEFAULTS, ANCHORS, config, params, draw)
