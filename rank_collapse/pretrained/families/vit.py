"""ViT (Dosovitskiy et al. 2021), DeiT (Touvron et al. 2021) with a distillation token, DINOv2
(Oquab et al. 2024) with LayerScale and registers (Darcet et al. 2024): patches, pre-norm.

The network's input is `cut_patches(image, size)`, one flattened patch a row. The gains of
LayerScale (Touvron et al. 2021) are the network's learned branch gains.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from rank_collapse.annotations import ArrayLike
from rank_collapse.checks import refuse, refuse_if
from rank_collapse.pretrained.entries import Settings
from rank_collapse.pretrained.family import (
    USUAL_READS,
    Entry,
    Family,
    Initialisation,
    NamedTensor,
    Names,
    count_entry,
)

_OUTSIDE = {
    "embedding.w_in": NamedTensor(
        "embeddings.patch_embeddings.projection.weight", "d c y x -> (c y x) d"
    ),
    "embedding.b_in": NamedTensor("embeddings.patch_embeddings.projection.bias", "d"),
    "embedding.positions": NamedTensor("embeddings.position_embeddings", "1 p d -> p d"),
    "embedding.class_token": NamedTensor("embeddings.cls_token", "1 1 d -> d"),
    "final_norm": "layernorm",
}
# Queries, keys, values and output: in files of transformers < 5 and in later ones.
_OLD = {
    "attention.q": "attention.attention.query",
    "attention.k": "attention.attention.key",
    "attention.v": "attention.attention.value",
    "attention.o": "attention.output.dense",
}
_NEW = {f"attention.{letter}": f"attention.{letter}_proj" for letter in "qkvo"}
_VIT_NORMS = {"attention_norm": "layernorm_before", "mlp_norm": "layernorm_after"}
_VIT_OLD = _OLD | {"mlp.in": "intermediate.dense", "mlp.out": "output.dense"} | _VIT_NORMS
_VIT_NEW = _NEW | {"mlp.in": "mlp.fc1", "mlp.out": "mlp.fc2"} | _VIT_NORMS


def _vit_names(weights, settings):
    """Return the names of the tensors, in the old or the new naming of ViT and DeiT."""
    old = weights.has_tensor("encoder.layer.")
    outside = dict(_OUTSIDE)
    if settings["model_type"] == "deit":
        outside["embedding.registers"] = NamedTensor(
            "embeddings.distillation_token", "1 r d -> r d"
        )
    stem, layer = ("encoder.layer.{}", _VIT_OLD) if old else ("layers.{}", _VIT_NEW)
    return Names(stem, layer, outside)


def _patch_fields(settings, registers=0):
    """Compute the fields of the embedding from patches, class token and registers."""
    patches, size = num_patches(settings)
    return {
        "d_input": settings["num_channels"] * size * size,
        "num_positions": patches + 1,
        "num_registers": registers,
    }


def _deit_fields(settings):
    """Add the distillation token, which stands after the class token and has a position."""
    embedding = _patch_fields(settings, registers=1)
    return {"embedding": embedding | {"num_positions": embedding["num_positions"] + 1}}


def _patch_sizes(settings):
    _, size = num_patches(settings)
    return {"c": settings["num_channels"], "y": size, "x": size}


VIT = Family(
    "vit",
    entries={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "image_size": Entry(224, (int, list), least=1),
        "patch_size": Entry(16, (int, list), least=1),
        "num_channels": count_entry(3),
        "qkv_bias": True,
    },
    reads=USUAL_READS | {"norm_eps": "layer_norm_eps"},
    names=_vit_names,
    anchors=("embeddings.cls_token",),
    fields={"norm_placement": "pre", "final_norm": True},
    embedding={"positions": "learned", "class_token": True, "norm": False},
    computed=lambda settings: {"embedding": _patch_fields(settings)},
    biases=dict.fromkeys("qkv", "qkv_bias"),
    init=Initialisation(),
    sizes=_patch_sizes,
)
DEIT = VIT.derive(
    "deit",
    embedding={"place_registers": True},
    computed=_deit_fields,
    init=Initialisation(values=dict.fromkeys(("_token", "position_embeddings"), 0.0)),
)


def _dinov2_fields(settings):
    """Return the fields of the MLP, of LayerScale and of the patches."""
    wide = int(settings["hidden_size"] * settings["mlp_ratio"])
    fields = {"d_ff": wide, "learned_branch_gain": settings["layerscale_value"]}
    if settings["use_swiglu_ffn"]:
        # Two thirds, up to a multiple of eight: as many parameters as without a gate.
        fields |= {"d_ff": (int(wide * 2 / 3) + 7) // 8 * 8, "mlp": "swiglu"}
    registers = settings.get("num_register_tokens", 0)
    return fields | {"embedding": _patch_fields(settings, registers)}


def _dinov2_names(weights, settings):
    """Return the names of the tensors, in the old or the new naming of DINOv2."""
    attention = (
        _OLD if weights.has_tensor(f"encoder.layer.0.{_OLD['attention.q']}.weight") else _NEW
    )
    mlp = {"mlp.in": "mlp.fc1", "mlp.out": "mlp.fc2"}
    if settings["use_swiglu_ffn"] and weights.has_tensor("encoder.layer.0.mlp.weights_in.weight"):
        mlp = {"mlp.gate_in": "mlp.weights_in", "mlp.out": "mlp.weights_out"}
    elif settings["use_swiglu_ffn"]:
        parts = (("gate", "gate"), ("in", "up"), ("out", "down"))
        mlp = {f"mlp.{place}": f"mlp.{name}_proj" for place, name in parts}
    norms_and_gains = {
        "attention_norm": "norm1",
        "attention_gains.branch": NamedTensor("layer_scale1.lambda1", "d"),
        "mlp_norm": "norm2",
        "mlp_gains.branch": NamedTensor("layer_scale2.lambda1", "d"),
    }
    outside = dict(_OUTSIDE)
    if settings.get("num_register_tokens", 0):
        outside["embedding.registers"] = NamedTensor("embeddings.register_tokens", "1 r d -> r d")
    return Names("encoder.layer.{}", attention | mlp | norms_and_gains, outside)


DINOV2 = VIT.derive(
    "dinov2",
    entries={
        "intermediate_size": None,
        "mlp_ratio": count_entry(4, most=1000),
        "layer_norm_eps": 1e-6,
        "patch_size": Entry(14, (int, list), least=1),
        "layerscale_value": Entry(1.0, (float,), least=-3.4e38),
        "use_swiglu_ffn": False,
    },
    reads={"d_ff": None},
    names=_dinov2_names,
    fields={"learned_per_feature": True},
    computed=_dinov2_fields,
    init=Initialisation(values={"register_tokens": 0.0, "lambda1": "layerscale_value"}),
)
DINOV2_REGISTERS = DINOV2.derive(
    "dinov2_with_registers",
    entries={"patch_size": Entry(16, (int, list), least=1), "num_register_tokens": 4},
)


def cut_patches(image: ArrayLike, size: int) -> Any:
    """Cut an image into squares, row by row, each flattened as (channel, y, x).

    Args:
        image: [channels, height, width].
        size: Side of a square.

    Returns:
        [n, channels · size²].

    Raises:
        ValueError: A height or width that the patch size does not divide.
    """
    c, height, width = image.shape
    refuse_if(
        height % size or width % size,
        f"patch size {size} does not divide an image of {height} x {width}",
    )
    grid = image.reshape(c, height // size, size, width // size, size)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, c * size * size)


def image_patches(images: ArrayLike, settings: Settings) -> Float[np.ndarray, "b n i"]:
    """Cut a batch of images into the patches that a given model reads.

    Args:
        images: [b, channels, height, width].
        settings: Settings of the model, from `pretrained.settings_of`.

    Raises:
        ValueError: Images of another shape than the model's, or with values that are not finite.
    """
    shape = (settings["num_channels"], *_as_pair(settings["image_size"]))
    refuse(
        (
            images.ndim != 4 or images.shape[1:] != shape or not len(images),
            f"images of shape {images.shape} are not [b, {shape}]",
        ),
        (not np.isfinite(images).all(), "images hold values that are not finite"),
    )
    _, size = num_patches(settings)
    return np.stack([cut_patches(image, size) for image in images])


def num_patches(settings: Settings) -> tuple[int, int]:
    """Return (patches of an image, side of each)."""
    height, width = _as_pair(settings["image_size"])
    size, other_side = _as_pair(settings["patch_size"])
    if size != other_side or height % size or width % size:
        raise ValueError(
            f"patch_size={settings['patch_size']} does not tile image_size={settings['image_size']}"
        )
    return (height // size) * (width // size), size


def _as_pair(value):
    """Read a size that config.json gives as one number for both axes, or as two: (height, width).

    Raises:
        ValueError: Neither, or a number that is not positive.
    """
    pair = [value, value] if isinstance(value, int) else value
    refuse_if(
        len(pair) != 2 or any(type(n) is not int or not 1 <= n < 2**31 for n in pair),
        f"image or patch size {value!r} is neither one whole number nor two",
    )
    return tuple(pair)
