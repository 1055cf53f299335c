"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and models of the same shape."""

import dataclasses
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("embeddings.word_embeddings.weight",)
DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    return _config(settings, num_positions=settings["max_position_embeddings"])


def _roberta_config(settings):
    """RoBERTa's positions begin behind the padding token's; earlier rows are unused."""
    rows = settings["max_position_embeddings"]
    return _config(settings, num_positions=rows - settings["pad_token_id"] - 1)


def _config(settings, num_positions):
    if settings["position_embedding_type"] not in ("absolute", None):
        value = settings["position_embedding_type"]
        raise ValueError(f"position_embedding_type={value!r} is not supported, only 'absolute'")
    d, eps = settings["hidden_size"], settings["layer_norm_eps"]
    return TransformerConfig(
        depth=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        d_model=d,
        d_ff=settings["intermediate_size"],
        mlp=activation(settings["hidden_act"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="post",
        norm_eps=eps,
        mask="causal" if settings["is_decoder"] else "none",
        cross_attention=bool(settings["is_decoder"] and settings["add_cross_attention"]),
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=d,
            positions="learned",
            num_positions=num_positions,
            num_segments=settings["type_vocab_size"],
            norm_eps=eps,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    d = config.d_model
    weights.check_depth("encoder.layer.{}", config.depth)

    def attention(name):
        parts = ("self.query", "self.key", "self.value", "output.dense")
        return weights.attention(tuple(f"{name}.{p}" for p in parts), config)

    def layer(i):
        name = f"encoder.layer.{i}"
        cross = {}
        if config.cross_attention:
            cross["cross"] = attention(f"{name}.crossattention")
            cross["cross_norm"] = weights.norm(f"{name}.crossattention.output.LayerNorm", d)
        return BlockParams(
            attention=attention(f"{name}.attention"),
            attention_norm=weights.norm(f"{name}.attention.output.LayerNorm", d),
            mlp=weights.mlp(f"{name}.intermediate.dense", f"{name}.output.dense", d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.output.LayerNorm", d),
            **cross,
        )

    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        embedding=embedding(weights, settings, config.embedding),
    )


def embedding(
    weights: Weights, settings: dict[str, Any], config: EmbeddingConfig
) -> EmbeddingParams:
    """Tokens, positions and segments, then a norm: the tables of BERT and ALBERT."""
    e, rows = config.d_embed, settings["max_position_embeddings"]
    positions = weights.take("embeddings.position_embeddings.weight", rows, e)
    segments = None
    if config.num_segments:
        name = "embeddings.token_type_embeddings.weight"
        segments = weights.take(name, config.num_segments, e)
    return weights.to_device(
        EmbeddingParams(
            tokens=weights.table("embeddings.word_embeddings.weight", config.vocab_size, e),
            positions=positions[rows - config.num_positions :],
            segments=segments,
            norm=weights.norm("embeddings.LayerNorm", e),
        )
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range); zero biases, unit gains, a zero row for the padding token."""
    return _draw(name, settings, padded=("word_embeddings.weight",))


def _roberta_draw(name, settings):
    """As BERT's, with a zero row in the table of positions too."""
    tables = ("word_embeddings.weight", "position_embeddings.weight")
    return _draw(name, settings, padded=tables)


def _draw(name, settings, padded):
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "LayerNorm" in name or "layer_norm" in name:
        return Draw(value=1.0)
    zero_row = settings["pad_token_id"] if name.endswith(padded) else None
    return Draw(std=settings["initializer_range"], zero_row=zero_row)


BERT = Family("bert", DEFAULTS, ANCHORS, config, params, draw)
XLM_ROBERTA = dataclasses.replace(
    BERT,
    model_type="xlm-roberta",
    defaults=DEFAULTS | {"pad_token_id": 1},
    config=_roberta_config,
    draw=_roberta_draw,
)
CAMEMBERT = dataclasses.replace(XLM_ROBERTA, model_type="camembert")
ROBERTA = dataclasses.replace(
    XLM_ROBERTA,
    model_type="roberta",
    defaults=DEFAULTS | {"pad_token_id": 1, "vocab_size": 50265},
)
