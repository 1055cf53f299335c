"""The table of families: what is refused."""

import re

import pytest

from rank_collapse import pretrained
from tests.oracles.architecture_cases import SMALL
from tests.support.refusals import is_refused, parametrize_refusals

REFUSED = {
    "llama": ({"hidden_act": "tanh"}, "hidden_act='tanh' of a llama model is not supported"),
    "mistral": ({"num_key_value_heads": 2}, "num_key_value_heads=2 does not divide num_att"),
    "qwen3": ({"layer_types": ["linear_attention"] * 3}, "layer_types has 'linear_attention'"),
    "qwen2": ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_l"),
    "phi3": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor is not a list of 4 numbers",
    ),
    "gpt_neox": ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral' is not one of"),
    "olmo2": ({"rope_scaling": {"type": "linear"}}, "factor=None is not a number"),
    "gemma2": (
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True of a gemma2 model is not supported, only None",
    ),
    "gemma3_text": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention.rope_type='linear' of a gemma3_text model",
    ),
    "mixtral": (
        {"num_experts_per_tok": 9, "num_key_value_heads": 3},
        "experts_per_token=9 is not a whole number from 1 to 8",
    ),
    "qwen2_moe": ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 of a qwen2_moe model"),
    "qwen3_moe": ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] of a qwen3_moe model"),
    "gptj": ({"rotary_dim": 65}, "rotary_width=65 is not even and between"),
    "phi": ({"qk_layernorm": True}, "qk_layernorm=True of a phi model is not supported"),
    "stablelm": ({"qk_layernorm": True}, "qk_layernorm=True of a stablelm model"),
    "cohere": ({"use_qk_norm": True}, "use_qk_norm=True of a cohere model is not supported"),
    "cohere2": ({"layer_types": ["chunked"] * 40}, "layer_types has 'chunked'"),
    "gemma": ({"hidden_act": "relu"}, "hidden_act='relu' of a gemma model is not supported"),
    "granite": ({"attention_multiplier": 0.0}, "attention_multiplier=0.0 is not between"),
    "smollm3": ({"no_rope_layers": [1, 2]}, r"no_rope_layers=\[1, 2\] is not a list of 36"),
    "olmo3": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}},
        "rope_parameters.sliding_attention.rope_type='yarn' of a olmo3 model",
    ),
    "modernbert": ({"hidden_activation": "tanh"}, "hidden_activation='tanh' of a modernbert"),
    "dinov2": ({"patch_size": 5}, "patch_size=5 does not tile image_size=224"),
    "whisper": ({"activation_function": "relu"}, "activation_function='relu' of a whisper"),
}

# Families from before there was this table; a new one is not added.
WITHOUT_REFUSAL = {
    "albert",
    "bert",
    "camembert",
    "deit",
    "dinov2_with_registers",
    "distilbert",
    "gpt2",
    "mt5",
    "roberta",
    "t5",
    "vit",
    "xlm-roberta",
    "xlnet",
}


def test_every_family_refuses_something():
    """Every model has an activation, a norm or a form of attention that we do not have."""
    assert pretrained.FAMILIES.keys() - REFUSED.keys() == WITHOUT_REFUSAL


@parametrize_refusals(
    [(name, *row) for name, row in REFUSED.items()]
    + [("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5")]
    + [("mistral", {"sliding_window": 1}, "sliding_window=1 leaves no other token")]
    + [
        ("smollm3", {"num_hidden_layers": 3, "no_rope_layers": row}, "is not a list of 3 entries")
        for row in ([0, 1, 2], [0, 1, None])
    ]
    + [
        (
            "vit",
            {"image_size": [24, 24], "patch_size": [2, 4]},
            r"patch_size=\[2, 4\] does not tile",
        ),
        ("vit", {"image_size": [4, 5], "patch_size": 2}, r"does not tile image_size=\[4, 5\]"),
        ("vit", {"image_size": [5, 4], "patch_size": 2}, r"does not tile image_size=\[5, 4\]"),
    ]
    + [("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh' is not support")]
    + [("t5", {"feed_forward_proj": "sine"}, "activation 'sine' is not one of")]
    + [
        (
            "albert",
            {"num_hidden_layers": 6000, "inner_group_num": 2},
            "num_hidden_layers=6000 times inner_group_num=2 is more than 10000 layers",
        )
    ]
    + [
        ("bert", {"hidden_size": 0}, "hidden_size=0 is not between 1 and"),
        ("bert", {"num_attention_heads": 0}, "num_attention_heads=0 is not between 1 and"),
        ("gpt2", {"n_layer": 10_001}, "n_layer=10001 is not between 1 and 10000"),
        ("albert", {"num_hidden_groups": 0}, "num_hidden_groups=0 is not between 1 and 10000"),
        ("albert", {"inner_group_num": 10_001}, "inner_group_num=10001 is not between 1 and"),
        ("gemma3", {}, "text_config=None is not an object"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True of a gpt2 model"),
        ("xlnet", {"bi_data": True}, "bi_data=True of a xlnet model"),
        ("xlnet", {"attn_type": "both"}, "attn_type='both' of a xlnet model"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation='gelu' of a gemma model"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] of a qwen2_moe"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 of a qwen3_moe"),
    ]
    # which was the usual base
    + [(name, {"rope_theta": 0}, "rope_theta=0.0 of") for name in ("llama", "gemma3_text")]
)
def test_what_is_not_supported_is_named(arguments, message):
    name, entries = arguments
    is_refused(message, lambda: pretrained.config_of(SMALL | {"model_type": name} | entries))


@parametrize_refusals(
    [
        ("t5", "both", r"part='both' of a t5 model is not one of \('encoder'"),
        ("bert", "encoder", r"part='encoder' of a bert model is not one of \(\)"),
        ("bart", None, "model_type='bart' is not one of"),
        (["bert"], None, r"model_type=\['bert'\] is not one of"),
    ]
)
def test_parts_and_kinds_that_there_are_not(arguments, message):
    name, part = arguments
    is_refused(message, lambda: pretrained.settings_of({"model_type": name}, part))


# The least number that an entry may be, of entries that count something and of others.
LEAST = {
    "bert": {"pad_token_id": -1},
    "xlm-roberta": {"pad_token_id": -1},
    "distilbert": {"pad_token_id": -1},
    "xlnet": {"clamp_len": -1},
    "t5": {"d_kv": 1, "d_ff": 1, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 1}
    | {"relative_attention_num_buckets": 1, "relative_attention_max_distance": 1, "d_model": 1},
    "mt5": {"d_ff": 1, "num_layers": 1},
    "gpt_neox": {"max_position_embeddings": 1, "num_attention_heads": 1},
    "llama": {"num_key_value_heads": 1, "head_dim": 1, "pad_token_id": -1},
    "phi3": {"original_max_position_embeddings": 1},
    "smollm3": {"no_rope_layer_interval": 1, "num_key_value_heads": 1},
    "cohere2": {"sliding_window_pattern": 1},
    "gemma": {"head_dim": 1, "num_key_value_heads": 1, "pad_token_id": -1},
    "gemma3_text": {"sliding_window_pattern": 1},
    "mixtral": {"num_experts_per_tok": 1, "num_local_experts": 1},
    "qwen2_moe": {"num_experts_per_tok": 1, "num_experts": 1, "num_local_experts": 1}
    | {"moe_intermediate_size": 1, "num_key_value_heads": 1},
    "qwen3_moe": {"num_experts_per_tok": 1, "num_experts": 1, "moe_intermediate_size": 1},
    "modernbert": {"global_attn_every_n_layers": 1, "pad_token_id": -1},
    "albert": {"num_hidden_layers": 1, "num_hidden_groups": 1, "inner_group_num": 1},
    "vit": {"image_size": 1, "patch_size": 1, "num_channels": 1, "num_hidden_layers": 1},
    "dinov2": {"patch_size": 1, "mlp_ratio": 1},
    "dinov2_with_registers": {"patch_size": 1, "mlp_ratio": 1},
    "whisper": {"num_mel_bins": 1, "encoder_layers": 1, "encoder_attention_heads": 1},
}


@pytest.mark.parametrize("name", LEAST)
def test_numbers_are_not_below_the_least_that_has_a_meaning(name):
    for entry, least in LEAST[name].items():
        settings = pretrained.settings_of({"model_type": name, entry: least})
        assert settings[entry] == least
        line = rf"^{entry}={least - 1} is not between {least} and"
        with pytest.raises(ValueError, match=line):
            pretrained.settings_of({"model_type": name, entry: least - 1})


@pytest.mark.parametrize(
    ("name", "entry", "values", "wrong"),
    [
        ("dinov2", "mlp_ratio", [1000], 1001),
        ("t5", "num_decoder_layers", [10_000], 10_001),
        ("t5", "num_layers", [10_000], 10_001),
        ("dinov2", "layerscale_value", [-1.0, 0, 1e38], -1e39),
        ("granite", "logits_scaling", [1e-9], -1e-9),
        ("granite", "logits_scaling", [1], 0.0),
    ],
)
def test_numbers_are_within_their_limits(name, entry, values, wrong):
    for value in values:
        assert pretrained.settings_of({"model_type": name, entry: value})[entry] == value
    with pytest.raises(ValueError, match=rf"^{entry}={re.escape(str(wrong))} is not between"):
        pretrained.settings_of({"model_type": name, entry: wrong})
