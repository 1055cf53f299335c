"""T5 (Raffel et al. 2020), encoder or decoder: pre-RMSNorm, position bias, unscaled scores.

The decoder looks at a memory: the `output` of the encoder's trace.
"""

import dataclasses
from typing import Any

from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.layers import MLPParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "initializer_factor": 1.0,
    "feed_forward_proj": "relu",
}
_GATED = {"gelu": "geglu_tanh", "gelu_new": "geglu_tanh", "silu": "swiglu", "relu": "reglu"}


def mlp_kind(feed_forward: str) -> str:
    """Our name of `feed_forward_proj`; its "gated-gelu" is the tanh approximation.

    Raises:
        ValueError: On one that is not known.
    """
    gated, name = feed_forward.startswith("gated-"), feed_forward.removeprefix("gated-")
    if gated and name not in _GATED:
        raise ValueError(f"feed_forward_proj={feed_forward!r} is not supported")
    return _GATED[name] if gated else activation(name)


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes: the part that `settings["part"]` names.

    Raises:
        ValueError: A variant that is not supported.
    """
    decoder = settings["part"] == "decoder"
    depth = settings["num_layers"]
    if decoder and settings["num_decoder_layers"] is not None:
        depth = settings["num_decoder_layers"]
    d = settings["d_model"]
    return TransformerConfig(
        depth=depth,
        num_heads=settings["num_heads"],
        d_model=d,
        d_qk=settings["d_kv"],
        d_v=settings["d_kv"],
        d_ff=settings["d_ff"],
        mlp=mlp_kind(settings["feed_forward_proj"]),
        attention_skip=True,
        mlp_skip=True,
        norm_placement="pre",
        norm="rms",
        norm_eps=settings["layer_norm_epsilon"],
        final_norm=True,
        mask="causal" if decoder else "none",
        scale_scores=False,
        position="relative_bias",
        num_buckets=settings["relative_attention_num_buckets"],
        max_distance=settings["relative_attention_max_distance"],
        cross_attention=decoder,
        embedding=EmbeddingConfig(vocab_size=settings["vocab_size"], d_embed=d, norm=False),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters from the model's tensors; T5 has no biases."""
    part, d, f = settings["part"], config.d_model, config.d_ff
    gated = settings["feed_forward_proj"].startswith("gated-")
    weights.check_depth(part + ".block.{}", config.depth)

    def attention(name):
        return weights.attention(tuple(f"{name}.{p}" for p in "qkvo"), config, bias=False)

    def mlp(name):
        w_in, b_in = weights.linear(f"{name}.{'wi_1' if gated else 'wi'}", d, f, bias=False)
        w_out, b_out = weights.linear(f"{name}.wo", f, d, bias=False)
        gate = {}
        if gated:
            gate["w_gate"], gate["b_gate"] = weights.linear(f"{name}.wi_0", d, f, bias=False)
        return MLPParams(w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out, **gate)

    def layer(i):
        name = f"{part}.block.{i}.layer"
        last = 2 if config.cross_attention else 1
        cross = {}
        if config.cross_attention:
            cross["cross"] = attention(f"{name}.1.EncDecAttention")
            cross["cross_norm"] = weights.norm(f"{name}.1.layer_norm", d, bias=False)
        return BlockParams(
            attention=attention(f"{name}.0.SelfAttention"),
            attention_norm=weights.norm(f"{name}.0.layer_norm", d, bias=False),
            mlp=mlp(f"{name}.{last}.DenseReluDense"),
            mlp_norm=weights.norm(f"{name}.{last}.layer_norm", d, bias=False),
            **cross,
        )

    own = f"{part}.embed_tokens.weight"
    tokens = own if weights.has(own) and not weights.drawn else "shared.weight"
    bias = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm(f"{part}.final_layer_norm", d, bias=False)),
        embedding=weights.to_device(
            EmbeddingParams(tokens=weights.table(tokens, config.embedding.vocab_size, d))
        ),
        position_bias=weights.to_device(weights.take(bias, config.num_buckets, config.num_heads)),
    )


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """T5's own scales, which stand in for the missing 1/√d_qk of the scores."""
    factor, d, k = settings["initializer_factor"], settings["d_model"], settings["d_kv"]
    if "layer_norm" in name:
        return Draw(value=factor)
    if name == "shared.weight":
        return Draw(std=factor)
    last = name.split(".")[-2]
    fan = {"q": d * k, "o": settings["num_heads"] * k, "wo": settings["d_ff"]}.get(last, d)
    return Draw(std=factor * fan**-0.5)


T5 = Family(
    "t5", DEFAULTS, ANCHORS, config, params, draw,
    parts=("encoder", "decoder"), kinds={"num_decoder_layers": (int,)},
)  # fmt: skip
MT5 = dataclasses.replace(
    T5,
    model_type="mt5",
    defaults=DEFAULTS
    | {
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
)
