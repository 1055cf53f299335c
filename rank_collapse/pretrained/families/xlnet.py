"""XLNet (Yang et al. 2019), content stream: relative attention with two biases and segments.

Without segments given, the segment term is absent, as in the published code. Permutation masks
and memories of earlier segments are left out: they belong to its pretraining.
"""

from rank_collapse.pretrained.family import Entry, Family, NamedTensor, Names


def _xlnet_fields(settings):
    return {
        "mask": "causal" if settings["attn_type"] == "uni" else "none",
        "clamp_distance": max(settings["clamp_len"], 0),
    }


XLNET = Family(
    "xlnet",
    entries={
        "vocab_size": 32000,
        "d_model": 1024,
        "n_layer": 24,
        "n_head": 16,
        "d_inner": 4096,
        "ff_activation": "gelu",
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": Entry(-1, (int,), least=-1),
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
    },
    reads={
        "depth": "n_layer",
        "num_heads": "n_head",
        "d_model": "d_model",
        "d_ff": "d_inner",
        "mlp": "ff_activation",
        "norm_eps": "layer_norm_eps",
        "vocab_size": "vocab_size",
    },
    names=Names(
        "layer.{}",
        {
            "attention.w_q": NamedTensor("rel_attn.q", "d h k -> h d k"),
            "attention.b_q": NamedTensor("rel_attn.r_w_bias", "h k"),
            "attention.w_k": NamedTensor("rel_attn.k", "d h k -> h d k"),
            "attention.b_k": NamedTensor(None, "h k"),
            "attention.w_v": NamedTensor("rel_attn.v", "d h v -> h d v"),
            "attention.b_v": NamedTensor(None, "h v"),
            "attention.w_o": NamedTensor("rel_attn.o", "d h v -> h v d"),
            "attention.b_o": NamedTensor(None, "d"),
            "attention.relative.w_r": NamedTensor("rel_attn.r", "d h k -> h d k"),
            "attention.relative.b_r": NamedTensor("rel_attn.r_r_bias", "h k"),
            "attention.relative.b_s": NamedTensor("rel_attn.r_s_bias", "h k"),
            "attention.relative.segment": NamedTensor("rel_attn.seg_embed", "2 h k"),
            "attention_norm": "rel_attn.layer_norm",
            "mlp.in": "ff.layer_1",
            "mlp.out": "ff.layer_2",
            "mlp_norm": "ff.layer_norm",
        },
        {"embedding.tokens": "word_embedding.weight"},
    ),
    anchors=("word_embedding.weight",),
    fields={"norm_placement": "post", "position": "relative_key"},
    embedding={"norm": False},
    computed=_xlnet_fields,
    allowed={"bi_data": (False,), "attn_type": ("bi", "uni")},
)
