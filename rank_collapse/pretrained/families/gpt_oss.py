"""gpt-oss (OpenAI 2025): a learned sink in each head, windows in every other layer, experts with a
clamp and biases."""

import numpy as np
from jax.tree_util import Partial

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.variant_heads import with_sink
from rank_collapse.pretrained.families.decoders import ATTENTION_BIAS, NAMES, decoder_fields
from rank_collapse.pretrained.families.experts import EXPERTS, MIXTRAL
from rank_collapse.pretrained.family import (
    Draw,
    Entry,
    Initialisation,
    Settings,
    Weights,
    by_layer,
    count,
)

_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}
_HALF = 0.6620365453328714  # z with z σ(1.702 z) = 1/2


def _fields(settings):
    if not settings["rope_parameters"] and not settings["rope_scaling"]:
        settings = settings | {"rope_scaling": _YARN}
    number = settings["num_local_experts"]
    return decoder_fields(settings, lambda i: i % 2 == 0) | {
        "d_ff": number * (settings["intermediate_size"] + 1),
        "num_experts": number,
        "mlp": "quick_geglu",
        "mlp_clamp": settings["swiglu_limit"],
    }


def _experts(weights: Weights, name: str, config: TransformerConfig) -> MLPParams:
    """The experts of a layer, each with a unit more: always 1/2, its row twice the output's bias.

    Files have gates and what they multiply in turn; 1 is added to the bias of the latter.
    """
    d, number, stem = config.d_model, config.num_experts, f"{name}mlp.experts"
    f = config.ff_width // number - 1
    joint = weights.take(f"{stem}.gate_up_proj", number, d, 2 * f)
    biases = np.asarray(weights.take(f"{stem}.gate_up_proj_bias", number, 2 * f), weights.dtype)
    down = weights.take(f"{stem}.down_proj", number, f, d)
    of_output = 2 * weights.take(f"{stem}.down_proj_bias", number, d)

    def wide(units, last):
        """[E, f, d] and, after the units of each expert, [E, d]: [E (f + 1), d]."""
        if weights.only_shapes:
            return np.broadcast_to(units[0, :1], (config.ff_width, d))
        return np.concatenate([units, last[:, None]], axis=1).reshape(-1, d)

    def beside(bias, last):
        return np.pad(bias, ((0, 0), (0, 1)), constant_values=last).reshape(-1)

    gate, up = (joint[:, :, i::2].transpose(0, 2, 1) for i in (0, 1))
    return MLPParams(
        w_in=wide(up, np.zeros_like(of_output)).T,
        b_in=beside(1 + biases[:, 1::2], 1),
        w_gate=wide(gate, np.zeros_like(of_output)).T,
        b_gate=beside(biases[:, ::2], _HALF),
        w_out=wide(down, of_output),
        w_router=weights.take(f"{name}mlp.router.weight", number, d).T,
        b_router=weights.take(f"{name}mlp.router.bias", number),
    )


def _sinks(weights, settings, config):
    # Without weights no memory is taken, however many heads a config has.
    sinks = np.broadcast_to(np.float32(0), (config.depth, config.num_heads))
    if weights is not None:
        sinks = by_layer(weights, config.depth, "layers.{}.self_attn.sinks", config.num_heads)
    return {"normalise": Partial(with_sink, sinks)}


def _draw(name: str, settings: Settings, depth: int) -> Draw:
    if name.endswith("router.bias"):
        return Draw(std=settings["initializer_range"])
    usual = Initialisation(values={"_bias": 0.0}, padded=("embed_tokens.weight",))
    return usual(name, settings, depth)


GPT_OSS = MIXTRAL.but(
    "gpt_oss",
    entries={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "head_dim": count(64),
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "layer_types": list,
        "num_local_experts": count(128),
        "num_experts_per_tok": count(4),
        "swiglu_alpha": 1.702,
        "swiglu_limit": Entry(7.0, (float,), least=1.0),
        "attention_bias": True,
    },
    names=NAMES._replace(layer=EXPERTS | {"mlp": _experts}),
    computed=_fields,
    held=_sinks,
    allowed={"swiglu_alpha": (1.702,), "hidden_act": ("silu",)},
    biases=ATTENTION_BIAS,
    init=_draw,
)
