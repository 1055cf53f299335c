"""Whisper's encoder (Radford et al. 2023): two convolutions over a log-mel spectrogram, pre-norm.

The network's input is the spectrogram, [frames, mel bins].
"""

import numpy as np

from rank_collapse.pretrained.families.decoders import ATTENTION
from rank_collapse.pretrained.family import (
    Draw,
    Family,
    Initialisation,
    NamedTensor,
    Names,
    count_entry,
)


def _whisper_draw(name, settings, depth):
    """Return how a tensor of Whisper is initialised: fixed sinusoids for positions, else as in most
    families.

    Args:
        name: Name of the tensor.
        settings: Settings of the model.
        depth: Number of layers.
    """
    if name.endswith("embed_positions.weight"):
        return Draw(value=_sinusoids)
    return Initialisation(std="init_std")(name, settings, depth)


def _sinusoids(rows, width):
    """Compute the sines of all waves, then their cosines; wavelengths from 2π to 10000 · 2π."""
    frequencies = 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(rows)[:, None] * frequencies[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


WHISPER = Family(
    "whisper",
    entries={
        "num_mel_bins": count_entry(80),
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "activation_function": "gelu",
        "d_model": 384,
        "init_std": 0.02,
        "max_source_positions": 1500,
        "scale_embedding": False,
    },
    reads={
        "depth": "encoder_layers",
        "num_heads": "encoder_attention_heads",
        "d_model": "d_model",
        "d_ff": "encoder_ffn_dim",
        "mlp": "activation_function",
        "d_input": "num_mel_bins",
        "num_positions": "max_source_positions",
    },
    names=Names(
        "layers.{}",
        ATTENTION
        | {
            "attention.o": "self_attn.out_proj",
            "attention_norm": "self_attn_layer_norm",
            "mlp.in": "fc1",
            "mlp.out": "fc2",
            "mlp_norm": "final_layer_norm",
        },
        {  # torch keeps the three steps of time last
            "embedding.w_in": NamedTensor("conv1.weight", "d i 3 -> 3 i d"),
            "embedding.b_in": NamedTensor("conv1.bias", "d"),
            "embedding.w_hidden": NamedTensor("conv2.weight", "d e 3 -> 3 e d"),
            "embedding.b_hidden": NamedTensor("conv2.bias", "d"),
            "embedding.positions": NamedTensor("embed_positions.weight", "p d"),
            "final_norm": "layer_norm",
        },
    ),
    anchors=("conv1.weight",),
    fields={"norm_placement": "pre", "norm_eps": 1e-5, "final_norm": True},
    embedding={"convolutions": True, "positions": "learned", "norm": False},
    allowed={"activation_function": ("gelu",)},  # the convolutions' too
    biases={"k": False},
    init=_whisper_draw,
)
