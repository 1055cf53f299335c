"""ModernBERT (Warner et al. 2024): an encoder with rotary positions, GeGLU and local windows."""

from rank_collapse.pretrained.families.decoders import ROTARY, layer_windows
from rank_collapse.pretrained.family import (
    USUAL_READS,
    Entry,
    Family,
    Initialisation,
    Names,
    count_entry,
    local_theta,
    rotary_entry,
    rotary_fields,
)


def _modernbert_fields(settings):
    """Make the fields of ModernBERT's configuration: rotary positions, windows and local theta."""
    interval, width = settings["global_attn_every_n_layers"], settings["hidden_size"]
    local = [bool(i % interval) for i in range(settings["num_hidden_layers"])]
    entry = {"rope_theta": settings["global_rope_theta"]} | rotary_entry(settings, "full_attention")
    return rotary_fields(entry, settings, width // settings["num_attention_heads"]) | {
        "windows": layer_windows(settings, local, settings["local_attention"] // 2),
        "local_theta": local_theta(settings, settings["local_rope_theta"]),
    }


MODERNBERT = Family(
    "modernbert",
    entries=ROTARY
    | {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 128,
        "global_attn_every_n_layers": count_entry(3),
        "layer_types": list,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "pad_token_id": Entry(50283, (int,), least=-1),
    },
    reads=USUAL_READS
    | {"mlp": "hidden_activation", "norm_eps": "norm_eps"}
    | {"vocab_size": "vocab_size", "num_positions": "max_position_embeddings"},
    names=Names(
        "layers.{}",
        {
            "attention.qkv": "attn.Wqkv",
            "attention.o": "attn.Wo",
            "attention_norm": "attn_norm",
            "mlp.gate_in": "mlp.Wi",
            "mlp.out": "mlp.Wo",
            "mlp_norm": "mlp_norm",
        },
        {
            "embedding.tokens": "embeddings.tok_embeddings.weight",
            "embedding.norm": "embeddings.norm",
            "final_norm": "final_norm",
        },
    ),
    anchors=("embeddings.tok_embeddings.weight",),
    # No norm of the first layer's attention is stored.
    fields={"norm_placement": "pre", "first_norm": False, "final_norm": True},
    computed=_modernbert_fields,
    gated=True,
    biases=dict.fromkeys(("qkv", "o"), "attention_bias")
    | dict.fromkeys(("gate_in", "out"), "mlp_bias")
    | {"norm": "norm_bias"},
    init=Initialisation(truncated=("",), residual=("Wo.weight",)),
)
