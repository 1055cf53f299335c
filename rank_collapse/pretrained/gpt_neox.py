"""GPT-NeoX (Black et al. 2022), Pythia: parallel residuals, a quarter of each head rotated."""

from typing import Any

from rank_collapse.network.attention import AttentionParams
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig, EmbeddingParams
from rank_collapse.network.parameters import BlockParams, TransformerParams
from rank_collapse.pretrained import decoder
from rank_collapse.pretrained.family import Family
from rank_collapse.pretrained.read_out import ReadOut
from rank_collapse.pretrained.rotary import num_positions, rotary_entry, rotary_fields
from rank_collapse.pretrained.weights import Draw, Weights, activation

ANCHORS = ("embed_in.weight",)
DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": None,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
}
KINDS = {"rope_theta": (float,), "rope_scaling": (dict,), "rope_parameters": (dict,)}


def config(settings: dict[str, Any]) -> TransformerConfig:
    """The network that a config.json describes.

    Raises:
        ValueError: A variant that is not supported.
    """
    d, h = settings["hidden_size"], settings["num_attention_heads"]
    entry = rotary_entry(settings)
    entry = {"rope_theta": settings["rotary_emb_base"]} | entry
    return TransformerConfig(
        depth=settings["num_hidden_layers"],
        num_heads=h,
        d_model=d,
        d_ff=settings["intermediate_size"],
        mlp=activation(settings["hidden_act"]),
        attention_skip=True,
        mlp_skip=True,
        parallel=settings["use_parallel_residual"],
        norm_placement="pre",
        norm_eps=settings["layer_norm_eps"],
        final_norm=True,
        mask="causal",
        init="bert",
        embedding=EmbeddingConfig(
            vocab_size=settings["vocab_size"],
            d_embed=d,
            num_positions=num_positions(entry, settings),
            norm=False,
        ),
        **rotary_fields(entry, settings, d // max(h, 1), share=settings["rotary_pct"]),
    )


def params(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> TransformerParams:
    """The network's parameters; `query_key_value` holds the three maps of head after head."""
    d, h, k, bias = config.d_model, config.num_heads, config.qk_width, settings["attention_bias"]
    weights.check_depth("layers.{}", config.depth)

    def attention(name):
        w = weights.take(f"{name}.query_key_value.weight", 3 * d, d)
        w_q, w_k, w_v = w.reshape(h, 3, k, d).transpose(1, 0, 3, 2)
        b_q = b_k = b_v = None
        if bias:
            b = weights.take(f"{name}.query_key_value.bias", 3 * d)
            b_q, b_k, b_v = b.reshape(h, 3, k).transpose(1, 0, 2)
        w_o, b_o = weights.heads_out(f"{name}.dense", d, h, k, bias)
        return AttentionParams(
            w_q=w_q, b_q=b_q, w_k=w_k, b_k=b_k, w_v=w_v, b_v=b_v, w_o=w_o, b_o=b_o
        )

    def layer(i):
        name = f"layers.{i}"
        maps = (f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h")
        return BlockParams(
            attention=attention(f"{name}.attention"),
            attention_norm=weights.norm(f"{name}.input_layernorm", d),
            mlp=weights.mlp(*maps, d, config.d_ff),
            mlp_norm=weights.norm(f"{name}.post_attention_layernorm", d),
        )

    tokens = weights.table("embed_in.weight", config.embedding.vocab_size, d)
    return TransformerParams(
        layers=weights.stack(range(config.depth), layer),
        final_norm=weights.to_device(weights.norm("final_layer_norm", d)),
        embedding=weights.to_device(EmbeddingParams(tokens=tokens)),
    )


def read_out(
    weights: Weights, settings: dict[str, Any], config: TransformerConfig
) -> ReadOut | None:
    """The language-model head: a table of its own, or that of the tokens; None without one."""
    return decoder.read_out(weights, settings, config, own="embed_out.weight", tokens=ANCHORS[0])


def draw(name: str, settings: dict[str, Any]) -> Draw:
    """Normal(0, initializer_range); zero biases, unit gains."""
    if name.endswith(".bias"):
        return Draw(value=0.0)
    if "layernorm" in name or "layer_norm" in name:
        return Draw(value=1.0)
    return Draw(std=settings["initializer_range"])


GPT_NEOX = Family("gpt_neox", DEFAULTS, ANCHORS, config, params, draw, read_out, kinds=KINDS)
