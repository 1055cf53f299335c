"""GPT-2 (Radford et al. 2019): causal, pre-norm, a norm at the end."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.read_out import ReadOut
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("wte.weight",)
DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    if settings["add_cross_attention"]:
        raise ValueError("add_cross_attention=True of a gpt2 model is not supported")
    depth, d = settings["n_layer"], settings["n_embd"]
    temperature = 1.0
    if settings["scale_attn_by_inverse_layer_idx"]:
        temperature = jnp.arange(1.0, depth + 1)
    return TransformerConfig(
        depth=depth,
        num_heads=settings["n_head"],
        d_model=d,
        d_ff=settings["n_inner"] or 4 * d,
        mlp=activation(settings["activation_function"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        norm_eps=settings["layer_norm_epsilon"],
        final_norm=True,
        mask="causal",
        scale_scores=bool(settings["scale_attn_weights"]),
        temperature=temperature,
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=d,
            positions="learned",
            num_positions=settings["n_positions"],
            norm=False,
        ),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors, whose maps are stored [in, out]."""
    d, h, f, tables = config.d_model, config.num_heads, config.d_ff, config.embedding
    weights.check_depth("h.{}", config.depth)

    def conv(name, d_in, d_out):
        return weights.take(f"{name}.weight", d_in, d_out), weights.take(f"{name}.bias", d_out)

    def layer(i):
        name = f"h.{i}"
        joint, joint_bias = conv(f"{name}.attn.c_attn", d, 3 * d)
        w = [part.reshape(d, h, d // h).transpose(1, 0, 2) for part in np.split(joint, 3, axis=1)]
        b = [part.reshape(h, d // h) for part in np.split(joint_bias, 3)]
        w_o, b_o = conv(f"{name}.attn.c_proj", d, d)
        w_in, b_in = conv(f"{name}.mlp.c_fc", d, f)
        w_out, b_out = conv(f"{name}.mlp.c_proj", f, d)
        return BlockParams(
            attention=AttentionParams(
                w_q=w[0], b_q=b[0], w_k=w[1], b_k=b[1], w_v=w[2], b_v=b[2],
                w_o=w_o.reshape(h, d // h, d), b_o=b_o,
            ),
            attention_norm=weights.norm(f"{name}.ln_1", d),
            mlp=MLPParams(w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out),
            mlp_norm=weights.norm(f"{name}.ln_2", d),
        )  # fmt: skip

    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm("ln_f", d)),
        embedding=weights.to_device(
            EmbeddingParams(
                tokens=weights.table("wte.weight", tables.vocab_size, d),
                positions=weights.take("wpe.weight", tables.num_positions, d),
            )
        ),
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range), divided by √(2 layers) where a branch joins the residual."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "ln_" in name:
        return Draw(value=1.0)
    std = settings["initializer_range"]
    if name.endswith("c_proj.weight"):
        std = std / math.sqrt(2 * settings["n_layer"])
    return Draw(std=std)


def read_out(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> ReadOut | None:
    """The language-model head: the table of tokens, or its own; None without one."""
    name = "wte.weight" if settings["tie_word_embeddings"] else "lm_head.weight"
    if not weights.has(name):
        return None
    return ReadOut(weights.table(name, config.embedding.vocab_size, config.d_model))


GPT2 = Family(
    "gpt2", DEFAULTS, ANCHORS, config, params, draw, read_out=read_out, kinds={"n_inner": (int,)}
)
