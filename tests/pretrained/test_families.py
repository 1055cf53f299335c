"""The table of families: its settings against `transformers`, what is refused, what is null."""

import warnings

import pytest

from rank_collapse import pretrained

SMALL = {"hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 20}


def test_every_entry_stands_under_its_own_name():
    for name, family in pretrained.FAMILIES.items():
        assert family.model_type == name
        for part in family.parts or (None,):
            assert pretrained.config_of({"model_type": name}, part).depth > 1


@pytest.mark.parametrize("name", pretrained.FAMILIES)
def test_absent_entries_are_what_transformers_takes_them_for(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        expected = transformers.AutoConfig.for_model(name).to_dict()
    # None stands for what follows from other entries.
    ours = {k: v for k, v in pretrained.FAMILIES[name].defaults.items() if v is not None}
    shared = ours.keys() & expected.keys()
    assert len(shared) > 6
    assert {k: ours[k] for k in shared} == {k: expected[k] for k in shared}


def test_null_means_the_default_and_parts_are_checked():
    settings = pretrained.settings_of({"model_type": "bert", "hidden_size": None, "other": None})
    assert settings["hidden_size"] == 768 and settings["other"] is None
    assert pretrained.settings_of({"model_type": "t5"})["part"] == "encoder"
    assert pretrained.settings_of({"model_type": "mt5"}, "decoder")["part"] == "decoder"
    with pytest.raises(ValueError, match=r"part='both' of a t5 model is not one of \('encoder'"):
        pretrained.settings_of({"model_type": "t5"}, "both")
    with pytest.raises(ValueError, match=r"part='encoder' of a bert model is not one of \(\)"):
        pretrained.settings_of({"model_type": "bert"}, "encoder")
    with pytest.raises(ValueError, match="model_type='bart' is not one of"):
        pretrained.settings_of({"model_type": "bart"})


@pytest.mark.parametrize(
    ("name", "positions"), [("bert", 20), ("roberta", 18), ("xlm-roberta", 18), ("camembert", 18)]
)
def test_roberta_keeps_rows_of_its_positions_for_padding(name, positions):
    config = pretrained.config_of(SMALL | {"model_type": name})
    assert config.embedding.num_positions == positions


def test_sliding_windows():
    """Entries of `windows` are distances, one less than what the models count; 0 for none."""

    def windows(name, **entries):
        given = {"model_type": name, "num_hidden_layers": 4, "num_key_value_heads": 3} | SMALL
        given |= {"sliding_window": 7} | entries
        return pretrained.config_of(given).windows

    assert windows("mistral") == (6,) * 4 and windows("mistral", sliding_window=None) == ()
    assert windows("qwen2") == () and windows("qwen2", use_sliding_window=True) == ()
    used = {"use_sliding_window": True, "max_window_layers": 3}
    assert windows("qwen2", **used) == (0, 0, 0, 6)
    assert windows("qwen3", **used, sliding_window=None) == (0, 0, 0, 4095)
    assert windows("gemma2") == (6, 0, 6, 0)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows("gemma2", layer_types=kinds) == (0, 6, 0, 6)
    assert windows("gemma3_text", num_hidden_layers=6) == (6,) * 5 + (0,)
    assert windows("modernbert", local_attention=10) == (0, 5, 5, 0)


def test_null_is_a_value_where_it_means_without():
    given = {"model_type": "gemma2", "hidden_size": 24, "num_key_value_heads": 8}
    assert pretrained.config_of(given).score_cap == 50.0
    assert pretrained.config_of(given | {"attn_logit_softcapping": None}).score_cap == 0.0
    assert pretrained.config_of(given | {"sliding_window": None}).windows == ()


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
        "experts_per_token=9 of num_experts=8",
    ),
    "qwen2_moe": ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 of a qwen2_moe model"),
    "qwen3_moe": ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] of a qwen3_moe model"),
    "modernbert": ({"hidden_activation": "tanh"}, "hidden_activation='tanh' of a modernbert"),
    "dinov2": ({"patch_size": 5}, "patch_size=5 does not tile image_size=224"),
    "whisper": ({"activation_function": "relu"}, "activation_function='relu' of a whisper"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name):
    entries, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        pretrained.config_of(SMALL | {"model_type": name} | entries)
