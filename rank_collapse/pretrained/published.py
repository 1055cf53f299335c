"""Sizes of the three models whose residual curves were published (Dong et al. 2021)."""

PUBLISHED = {
    "bert-base-cased": {
        "model_type": "bert",
        "vocab_size": 28996,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "albert-base-v2": {
        "model_type": "albert",
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "xlnet-base-cased": {
        "model_type": "xlnet",
        "vocab_size": 32000,
        "d_model": 768,
        "n_layer": 12,
        "n_head": 12,
        "d_inner": 3072,
    },
}
