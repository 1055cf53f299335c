"""T5 (Raffel et al. 2020), encoder or decoder: pre-RMSNorm, position bias, unscaled scores.

The decoder attends to a memory: the `output` of the encoder's trace.
"""

from rank_collapse.pretrained.family import (
    MAX_LAYERS,
    Draw,
    Family,
    NamedTensor,
    Names,
    Settings,
    activation_name,
    count_entry,
)

_GATED = {"gelu": "geglu_tanh", "gelu_new": "geglu_tanh", "silu": "swiglu", "relu": "reglu"}


def mlp_kind(feed_forward: str) -> str:
    """Return our name of `feed_forward_proj`; its "gated-gelu" is the tanh approximation."""
    gated, name = feed_forward.startswith("gated-"), feed_forward.removeprefix("gated-")
    if gated and name not in _GATED:
        raise ValueError(f"feed_forward_proj={feed_forward!r} is not supported")
    return _GATED[name] if gated else activation_name(name)


def _t5_fields(settings):
    """Return the fields that differ between encoder and decoder."""
    decoder = settings["part"] == "decoder"
    fields = {"mask": "causal" if decoder else "none", "cross_attention": decoder}
    if decoder and settings["num_decoder_layers"] is not None:
        fields["depth"] = settings["num_decoder_layers"]
    return fields | {"mlp": mlp_kind(settings["feed_forward_proj"])}


def _t5_names(weights, settings):
    """Return the names of the tensors of the encoder or decoder."""
    part = settings["part"]
    mlp = "2.DenseReluDense" if part == "decoder" else "1.DenseReluDense"
    tokens_name = f"{part}.embed_tokens.weight"
    has_table = weights.has_tensor(tokens_name) and not weights.is_random
    tokens = tokens_name if has_table else "shared.weight"
    bias = f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    layer = {
        **{f"attention.{letter}": f"0.SelfAttention.{letter}" for letter in "qkvo"},
        **{f"cross.{letter}": f"1.EncDecAttention.{letter}" for letter in "qkvo"},
        "attention_norm": "0.layer_norm",
        "cross_norm": "1.layer_norm",
        "mlp.in": f"{mlp}.wi",
        "mlp.out": f"{mlp}.wo",
        "mlp_norm": f"{mlp[0]}.layer_norm",
    }
    if settings["feed_forward_proj"].startswith("gated-"):
        layer |= {"mlp.in": f"{mlp}.wi_1", "mlp.gate": f"{mlp}.wi_0"}
    outside = {
        "embedding.tokens": tokens,
        "position_bias": NamedTensor(bias, "b h"),
        "final_norm": f"{part}.final_layer_norm",
    }
    return Names(part + ".block.{}.layer", layer, outside)


def _t5_law(name: str, settings: Settings, depth: int) -> Draw:
    """Return how a tensor of T5 is drawn: with T5's own scales, which replace the missing 1/√d_qk
    of the scores.

    Args:
        name: Name of the tensor.
        settings: Settings of the model.
        depth: Number of layers, on which nothing depends.
    """
    factor, d, k = settings["initializer_factor"], settings["d_model"], settings["d_kv"]
    if "layer_norm" in name:
        return Draw(value=factor)
    if name == "shared.weight":
        return Draw(std=factor)
    last = name.split(".")[-2]
    fan = {"q": d * k, "o": settings["num_heads"] * k, "wo": settings["d_ff"]}.get(last, d)
    return Draw(std=factor * fan**-0.5)


T5 = Family(
    "t5",
    entries={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": count_entry(64),
        "d_ff": count_entry(2048),
        "num_layers": 6,
        "num_decoder_layers": count_entry(most=MAX_LAYERS),
        "num_heads": 8,
        "relative_attention_num_buckets": count_entry(32),
        "relative_attention_max_distance": count_entry(128),
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
        "feed_forward_proj": "relu",
    },
    reads={
        "depth": "num_layers",
        "num_heads": "num_heads",
        "d_model": "d_model",
        "d_qk": "d_kv",
        "d_v": "d_kv",
        "d_ff": "d_ff",
        "norm_eps": "layer_norm_epsilon",
        "num_buckets": "relative_attention_num_buckets",
        "max_distance": "relative_attention_max_distance",
        "vocab_size": "vocab_size",
    },
    names=_t5_names,
    anchors=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    fields={
        "norm_placement": "pre",
        "norm": "rms",
        "final_norm": True,
        "scale_scores": False,
        "position": "relative_bias",
        "init": "lecun",
    },
    embedding={"norm": False},
    computed=_t5_fields,
    biases={"": False},
    init=_t5_law,
    parts=("encoder", "decoder"),
)
MT5 = T5.derive(
    "mt5",
    entries={
        "vocab_size": 250112,
        "d_ff": count_entry(1024),
        "num_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    },
)
