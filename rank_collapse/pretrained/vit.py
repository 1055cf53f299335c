"""ViT (Dosovitskiy et al. 2021): image patches, a class token, pre-norm. DeiT (Touvron et al.
2021): the same with a distillation token.

The network's input is `patches(image, size)`, one flattened patch a row.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("embeddings.cls_token",)
DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
# Where a tensor of layer i lies: in files of transformers < 5 and in later ones.
_OLD = ("encoder.layer.{}", ".attention.attention.{}", "query key value", ".attention.output.dense")
_NEW = ("layers.{}", ".attention.{}", "q_proj k_proj v_proj", ".attention.o_proj")
_OLD_MLP, _NEW_MLP = (".intermediate.dense", ".output.dense"), (".mlp.fc1", ".mlp.fc2")


def patches(image: Any, size: int) -> Any:
    """Non-overlapping squares of an image, row by row, each flattened as (channel, y, x).

    Args:
        image: [channels, height, width].
        size: Side of a square.

    Returns:
        [n, channels · size²].

    Raises:
        ValueError: A height or width that the patch size does not divide.
    """
    c, height, width = image.shape
    if height % size or width % size:
        raise ValueError(f"patch size {size} does not divide an image of {height} x {width}")
    grid = image.reshape(c, height // size, size, width // size, size)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, c * size * size)


def image_patches(images: Any, settings: dict[str, Any]) -> Float[np.ndarray, "b n i"]:
    """`patches` of a batch of images [b, channels, height, width] for a given model.

    Raises:
        ValueError: Images of another shape than the model's.
    """
    height, width = _pair(settings["image_size"])
    shape = (settings["num_channels"], height, width)
    if images.ndim != 4 or images.shape[1:] != shape or not len(images):
        raise ValueError(f"images of shape {images.shape} are not [b, {shape}]")
    size, _ = _pair(settings["patch_size"])
    return np.stack([patches(image, size) for image in images])


def _pair(value):
    pair = [value, value] if isinstance(value, int) else value
    if len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise ValueError(f"image or patch size {value!r} is neither a whole number nor two")
    return tuple(pair)


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: Patches that do not tile the image, or are not square.
    """
    return _config(settings, place_registers=False, num_registers=0)


def _deit_config(settings):
    """The distillation token stands behind the class token, and has a position."""
    return _config(settings, place_registers=True, num_registers=1)


def num_patches(settings: dict[str, Any]) -> tuple[int, int]:
    """(patches of an image, side of each).

    Raises:
        ValueError: Patches that do not tile the image, or are not square.
    """
    (height, width), (size, other) = _pair(settings["image_size"]), _pair(settings["patch_size"])
    if size != other or height % size or width % size:
        raise ValueError(
            f"patch_size={settings['patch_size']} does not tile image_size={settings['image_size']}"
        )
    return (height // size) * (width // size), size


def _config(settings, num_registers, place_registers):
    d, (count, size) = settings["hidden_size"], num_patches(settings)
    return TransformerConfig(
        depth=settings["num_hidden_layers"],
        num_heads=settings["num_attention_heads"],
        d_model=d,
        d_ff=settings["intermediate_size"],
        mlp=activation(settings["hidden_act"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        norm_eps=settings["layer_norm_eps"],
        final_norm=True,
        init="bert",
        embedding=EmbeddingConfig(
            d_input=settings["num_channels"] * size * size,
            d_embed=d,
            positions="learned",
            num_positions=count + 1 + num_registers,
            class_token=True,
            num_registers=num_registers,
            place_registers=place_registers,
            norm=False,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors."""
    d, tables = config.d_model, config.embedding
    old = weights.has("encoder.layer.")
    stem, parts, letters, output = _OLD if old else _NEW
    maps = _OLD_MLP if old else _NEW_MLP
    weights.check_depth(stem, config.depth)
    h, k = config.num_heads, config.qk_width

    def layer(i):
        name = stem.format(i)
        into = [name + parts.format(letter) for letter in letters.split()]
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
            weights.heads_in(n, d, h, k, settings["qkv_bias"]) for n in into
        )
        w_o, b_o = weights.heads_out(name + output, d, h, k)
        return BlockParams(
            attention=AttentionParams(
                w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
            ),
            attention_norm=weights.norm(f"{name}.layernorm_before", d),
            mlp=weights.mlp(name + maps[0], name + maps[1], d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.layernorm_after", d),
        )

    registers = None
    if tables.num_registers:
        registers = weights.take("embeddings.distillation_token", 1, 1, d)[0]
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm("layernorm", d)),
        embedding=patch_embedding(weights, settings, tables, registers),
    )


def patch_embedding(
    weights: Weights, settings: dict[str, Any], config: EmbeddingConfig, registers: Any = None
) -> EmbeddingParams:
    """The map of patches, the class token and the positions, with what else stands behind it."""
    d, (_, size) = config.d_embed, num_patches(settings)
    kernel = "embeddings.patch_embeddings.projection"
    w_in = weights.take(f"{kernel}.weight", d, settings["num_channels"], size, size)
    rows = weights.take("embeddings.position_embeddings", 1, config.num_positions, d)
    return weights.to_device(
        EmbeddingParams(
            w_in=w_in.reshape(d, -1).T,
            b_in=weights.take(f"{kernel}.bias", d),
            positions=rows[0],
            class_token=weights.take("embeddings.cls_token", 1, 1, d)[0, 0],
            registers=registers,
        )
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range), cut for the class token and the positions."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "layernorm" in name:
        return Draw(value=1.0)
    std = settings["initializer_range"]
    return Draw(std=std, truncate=name.endswith(("cls_token", "position_embeddings")))


def _deit_draw(name, settings):
    """DeiT's tokens and positions begin at zero."""
    if name.endswith(("_token", "position_embeddings")):
        return Draw(value=0.0)
    return draw(name, settings)


KINDS = dict.fromkeys(("image_size", "patch_size"), (int, list))
VIT = Family("vit", DEFAULTS, ANCHORS, config, params, draw, kinds=KINDS)
DEIT = dataclasses.replace(VIT, model_type="deit", config=_deit_config, draw=_deit_draw)
