"""GPT-2 (Radford et al. 2019), GPT-J (Wang and Komatsuzaki 2021), GPT-NeoX (Black et al. 2022) and
Pythia, Phi (Li et al. 2023): causal, LayerNorm, pre-norm.

GPT-2 stores its maps [in, out], the three of attention in one. The others have parallel residuals
and a share of each head rotated; GPT-NeoX has the three maps of head after head in one, GPT-J and
Phi one norm for both branches.
"""

import jax.numpy as jnp

from rank_collapse.pretrained.families.decoders import (
    ATTENTION,
    NORMS,
    ONE_NORM,
    ROTARY,
    decoder_fields,
)
from rank_collapse.pretrained.family import (
    USUAL_READS,
    Entry,
    Family,
    Initialisation,
    Map,
    NamedTensor,
    Names,
    count_entry,
    rotary_entry,
)


def _gpt2_fields(settings):
    """Make the fields of GPT-2's configuration: the temperature by layer, and the MLP's width."""
    depth, fields = settings["n_layer"], {}
    if settings["scale_attn_by_inverse_layer_idx"]:
        fields["temperature"] = jnp.arange(1.0, depth + 1)
    return fields | {"d_ff": settings["n_inner"] or 4 * settings["n_embd"]}


def _gptj_fields(settings):
    fields = {"position": "rotary", "rotary_width": settings["rotary_dim"]}
    return fields | {"d_ff": settings["n_inner"] or 4 * settings["n_embd"]}


def _gpt_neox_fields(settings):
    entry = {"rope_theta": settings["rotary_emb_base"]} | rotary_entry(settings)
    settings = settings | {"partial_rotary_factor": settings["rotary_pct"]}
    return decoder_fields(settings, entry=entry)


GPT2 = Family(
    "gpt2",
    entries={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": int,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    reads={
        "depth": "n_layer",
        "num_heads": "n_head",
        "d_model": "n_embd",
        "mlp": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "scale_scores": "scale_attn_weights",
        "vocab_size": "vocab_size",
        "num_positions": "n_positions",
    },
    names=Names(
        "h.{}",
        {
            "attention.qkv": Map("attn.c_attn", "d (3 h k) -> 3 h d k", "(3 h k) -> 3 h k"),
            "attention.o": Map("attn.c_proj", "(h v) d -> h v d", "d"),
            "attention_norm": "ln_1",
            "mlp.in": Map("mlp.c_fc", "d f", "f"),
            "mlp.out": Map("mlp.c_proj", "f d", "d"),
            "mlp_norm": "ln_2",
        },
        {
            "embedding.tokens": "wte.weight",
            "embedding.positions": NamedTensor("wpe.weight", "p d"),
            "final_norm": "ln_f",
        },
    ),
    anchors=("wte.weight",),
    fields={"norm_placement": "pre", "final_norm": True, "mask": "causal"},
    embedding={"positions": "learned", "norm": False},
    computed=_gpt2_fields,
    allowed={"add_cross_attention": (False,)},
    init=Initialisation(residual=("c_proj.weight",)),
    head="lm_head.weight",
)
GPTJ = GPT2.derive(
    "gptj",
    entries={
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": Entry(64, (int,), nullable=True),
        "scale_attn_weights": None,
        "scale_attn_by_inverse_layer_idx": None,
        "add_cross_attention": None,
        "tie_word_embeddings": False,
    },
    reads={"scale_scores": None},
    names=Names(
        "h.{}",
        {
            **{f"attention.{letter}": f"attn.{letter}_proj" for letter in "qkv"},
            "attention.o": "attn.out_proj",
            "attention_norm": "ln_1",
            "mlp.in": "mlp.fc_in",
            "mlp.out": "mlp.fc_out",
            "mlp_norm": "ln_1",
        },
        {"embedding.tokens": "wte.weight", "final_norm": "ln_f"},
    ),
    fields={"parallel": True},
    embedding={"positions": "none"},
    computed=_gptj_fields,
    interleaved=True,
    allowed={"add_cross_attention": None},
    biases=dict.fromkeys("qkvo", False) | {"head": True},
    init=Initialisation(),
)
GPT_NEOX = Family(
    "gpt_neox",
    entries=ROTARY
    | {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "max_position_embeddings": count_entry(2048),
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
    },
    reads=USUAL_READS
    | {"norm_eps": "layer_norm_eps", "parallel": "use_parallel_residual"}
    | {"vocab_size": "vocab_size"},
    names=Names(
        "layers.{}",
        {
            "attention.qkv": Map(
                "attention.query_key_value", "(h 3 k) d -> 3 h d k", "(h 3 k) -> 3 h k"
            ),
            "attention.o": "attention.dense",
            "mlp.in": "mlp.dense_h_to_4h",
            "mlp.out": "mlp.dense_4h_to_h",
            **NORMS,
        },
        {"embedding.tokens": "embed_in.weight", "final_norm": "final_layer_norm"},
    ),
    anchors=("embed_in.weight",),
    fields={"norm_placement": "pre", "final_norm": True, "mask": "causal"},
    embedding={"norm": False},
    computed=_gpt_neox_fields,
    biases=dict.fromkeys(("qkv", "o"), "attention_bias"),
    head="embed_out.weight",
)
PHI = GPT_NEOX.derive(
    "phi",
    entries={
        "vocab_size": 51200,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": count_entry(),
        "intermediate_size": 8192,
        "hidden_act": "gelu_new",
        "use_parallel_residual": None,
        "attention_bias": None,
        "rotary_emb_base": None,
        "rotary_pct": None,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
    reads={"parallel": None},
    names=Names(
        "layers.{}",
        ATTENTION
        | ONE_NORM
        | {"attention.o": "self_attn.dense", "mlp.in": "mlp.fc1", "mlp.out": "mlp.fc2"},
        {"embedding.tokens": "embed_tokens.weight", "final_norm": "final_layernorm"},
    ),
    anchors=("embed_tokens.weight",),
    fields={"parallel": True},
    computed=decoder_fields,
    allowed={"qk_layernorm": (False,)},  # LayerNorm of queries and keys
    biases={"qkv": None, "o": None, "head": True},
    head="lm_head.weight",
)
