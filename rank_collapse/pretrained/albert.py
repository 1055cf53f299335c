"""ALBERT (Lan et al. 2020): groups of shared layers, embedding factorised through a small width."""

from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained import bert
from rank_collapse.pretrained.family import MAX_LAYERS, Family
from rank_collapse.pretrained.weights import Weights, activation

DEFAULTS = {
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_size": 4096,
    "num_hidden_layers": 12,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
}


def rows(settings: dict[str, Any]) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """The layers that are used, as (group, place in the group), and the row of each depth.

    Each of `num_hidden_layers` steps runs through all inner layers of its group.
    """
    steps, groups = settings["num_hidden_layers"], settings["num_hidden_groups"]
    if steps * settings["inner_group_num"] > MAX_LAYERS:
        raise ValueError(
            f"num_hidden_layers={steps} times inner_group_num={settings['inner_group_num']} is "
            f"more than {MAX_LAYERS} layers"
        )
    sequence = [
        (int(step / (steps / groups)), inner)
        for step in range(steps)
        for inner in range(settings["inner_group_num"])
    ]
    used = sorted(set(sequence))
    return used, tuple(used.index(pair) for pair in sequence)


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    if settings["position_embedding_type"] not in ("absolute", None):
        value = settings["position_embedding_type"]
        raise ValueError(f"position_embedding_type={value!r} is not supported, only 'absolute'")
    eps = settings["layer_norm_eps"]
    _, layer_map = rows(settings)
    return TransformerConfig(
        depth=len(layer_map),
        num_heads=settings["num_attention_heads"],
        d_model=settings["hidden_size"],
        d_ff=settings["intermediate_size"],
        mlp=activation(settings["hidden_act"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="post",
        norm_eps=eps,
        layer_map=layer_map,
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=settings["embedding_size"],
            positions="learned",
            num_positions=settings["max_position_embeddings"],
            num_segments=settings["type_vocab_size"],
            projection="after_norm",
            norm_eps=eps,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    d = config.d_model
    used, _ = rows(settings)
    weights.check_depth("encoder.albert_layer_groups.{}", settings["num_hidden_groups"])
    inner = "encoder.albert_layer_groups.0.albert_layers.{}"
    weights.check_depth(inner, settings["inner_group_num"])

    def layer(row):
        name = "encoder.albert_layer_groups.{}.albert_layers.{}".format(*row)
        parts = [f"{name}.attention.{p}" for p in ("query", "key", "value", "dense")]
        return BlockParams(
            attention=weights.attention(tuple(parts), config),
            attention_norm=weights.norm(f"{name}.attention.LayerNorm", d),
            mlp=weights.mlp(f"{name}.ffn", f"{name}.ffn_output", d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.full_layer_layer_norm", d),
        )

    e = config.embedding.d_embed
    w, b = weights.linear("encoder.embedding_hidden_mapping_in", e, d)
    tables = bert.embedding(weights, settings, config.embedding)
    w, b = weights.to_device((w, b))
    return TransformerParams(
        layers=weights.stack(used, layer), embedding=tables.replace(w_project=w, b_project=b)
    )


ALBERT = Family("albert", DEFAULTS, bert.ANCHORS, config, params, bert.draw)
