"""DiffLlama: differential attention (Ye et al. 2024) in a Llama.

Two heads of the file are one here, with queries, keys and values twice as wide: head i and the one
half of the heads after it.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from rank_collapse.network.attention import AttentionContext
from rank_collapse.network.variant_heads import differential
from rank_collapse.pretrained.families.decoders import LLAMA, NAMES, decoder_fields
from rank_collapse.pretrained.family import ANY_LENGTH, Draw, Map, Settings, by_layer, unscaled


def _fields(settings):
    heads = settings["num_attention_heads"]
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (settings[name] or heads) % 2:
            raise ValueError(f"{name}={settings[name]} of a diffllama model is odd")
    fields = decoder_fields(settings)
    frequencies, width = tuple(map(float, unscaled(fields, settings))), 2 * fields["d_qk"]
    if 4 * len(frequencies) != width:
        raise ValueError("partial_rotary_factor of a diffllama model is not supported, only 1.0")
    tables = ((ANY_LENGTH, 2 * frequencies),)
    return fields | {
        "num_heads": heads // 2,
        "d_qk": width,
        "d_v": width,
        "rotary_tables": tables,
    }


def _sizes(settings):
    fields = _fields(settings)
    groups = (settings["num_key_value_heads"] or settings["num_attention_heads"]) // 2
    return {"g": groups, "part": 2, "j": fields["d_qk"] // 4, "w": fields["d_v"] // 2}


def in_quarters(
    lambda_init: Any,
    vectors: Any,
    eps: Any,
    q: Float[Array, "h n k"],
    k: Float[Array, "h n k"],
    v: Float[Array, "h n v"],
    context: AttentionContext,
) -> tuple[Float[Array, "h n n"], Float[Array, "h n v"]]:
    """`differential` of two halves whose features stand quarter by quarter.

    The first quarters of both halves come before the second ones: one rotation turns both halves.
    """

    def halves(a):
        return a.reshape(*a.shape[:2], 2, 2, -1).swapaxes(2, 3).reshape(a.shape)

    return differential(lambda_init, vectors, eps, halves(q), halves(k), v, context)


def _lambdas(weights, settings, config):
    start = jnp.asarray([0.8 - 0.6 * math.exp(-0.3 * l) for l in range(config.depth)])
    vectors = None
    if weights is not None:
        names = [f"layers.{{}}.self_attn.lambda_{letter}{i}" for i in (1, 2) for letter in "qk"]
        each = [by_layer(weights, config.depth, name, config.d_qk // 2) for name in names]
        vectors = jnp.stack(each, axis=1)
    return {"mix": Partial(in_quarters, start, vectors, settings["rms_norm_eps"])}


def _draw(name: str, settings: Settings, depth: int) -> Draw:
    if ".lambda_" in name:
        return Draw(std=settings["lambda_std_dev"])
    return LLAMA.init(name, settings, depth)


def _axes(rows, head, features):
    """Of a weight and of a bias."""
    return f"{rows} d -> {head} d {features}", f"{rows} -> {head} {features}"


DIFFLLAMA = LLAMA.but(
    "diffllama",
    entries={
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rms_norm_eps": 1e-5,
        "lambda_std_dev": 0.1,
        "mlp_bias": None,
    },
    names=NAMES._replace(
        layer=NAMES.layer
        | {
            "attention.q": Map("self_attn.q_proj", *_axes("(2 h part j)", "h", "(part 2 j)")),
            "attention.k": Map("self_attn.k_proj", *_axes("(2 g part j)", "g", "(part 2 j)")),
            "attention.v": Map("self_attn.v_proj", *_axes("(2 g w)", "g", "(2 w)")),
        }
    ),
    computed=_fields,
    held=_lambdas,
    biases=dict.fromkeys(("gate", "in", "out")),
    init=_draw,
    sizes=_sizes,
)
