"""The table of families: its settings against `transformers`, what they give, what is null."""

import math
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse import pretrained
from rank_collapse.network.config import DEFAULTS, flat
from rank_collapse.network.layers import get_activation
from rank_collapse.pretrained.families.vit import cut_patches, image_patches
from rank_collapse.pretrained.family import ACTIVATIONS, GATES
from tests.oracles.architecture_cases import CASES, FORMS, SMALL
from tests.support.refusals import is_refused

# Entries of transformers' configs that change no hidden state, by words in their names: training,
# generation, heads and poolers; what other entries imply; memories and decoders that are left out.
UNREAD = (
    "dropout",
    "pdrop",
    "drop_path",
    "jitter",
    "layerdrop",
    "mask_",
    "use_mask_token",
    "token_id",
    "use_cache",
    "suppress",
    "median_filter",
    "reorder_and_upcast",
    "mem",
    "classifier",
    "summary",
    "start_n_top",
    "end_n_top",
    "pooler",
    "router_",
    "weighted_layer",
    "sparse_pred",
    "deterministic",
    "decoder_bias",
    "cutoff",
    "spec_augment",
    "pretraining_tp",
    "d_head",
    "dense_act_fn",
    "is_gated_act",
    "is_decoder",
    "_sliding_window_pattern",
    "tie_word_embeddings",
    "scale_decoder_outputs",
    "reuse_len",
    "same_length",
    "encoder_stride",
    "out_",
    "stage_names",
    "reshape_hidden",
    "apply_layernorm",
    "linear_",
    "output_router",
)

FAMILY_WORDS = {"whisper": ("decoder_", "vocab_size", "max_target"), "cohere2": ("head_dim",)}

# Entries that only files of earlier versions have.
EARLIER = {
    "position_embedding_type",
    "rope_theta",
    "rope_scaling",
    "rotary_pct",
    "rotary_emb_base",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
    "full_attention_interval",
    "hidden_activation",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "layer_types",
    "max_window_layers",
}


def test_every_entry_stands_under_its_own_name():
    for name, family in pretrained.FAMILIES.items():
        assert family.model_type == name
        for part in family.parts or (None,):
            config = pretrained.config_of({"model_type": name}, part)
            assert config.depth > 1 and config.family == name


@pytest.mark.parametrize("name", pretrained.FAMILIES)
def test_entries_are_those_of_transformers_and_absent_ones_its_defaults(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        expected = transformers.AutoConfig.for_model(name).to_dict()
        common = transformers.PreTrainedConfig().to_dict().keys()
    read = pretrained.FAMILIES[name].entries.keys()
    words = UNREAD + FAMILY_WORDS.get(name, ())
    unread = {e for e in expected.keys() - common - read if not any(w in e for w in words)}
    assert not unread and not read - expected.keys() - EARLIER
    # None stands for what follows from other entries.
    schema = pretrained.FAMILIES[name].schema
    ours = {k: entry.default for k, entry in schema.items() if entry.default is not None}
    shared = ours.keys() & expected.keys()
    assert len(shared) > 6
    assert {k: ours[k] for k in shared} == {k: expected[k] for k in shared}
    if rotary := expected.get("rope_parameters"):
        config = pretrained.config_of({"model_type": name})
        full, local = (rotary.get(f"{k}_attention", rotary) for k in ("full", "sliding"))
        width = full.get("partial_rotary_factor", 1.0) * config.qk_width
        assert (config.rotary_width or config.qk_width) == width
        assert config.rotary_theta == full["rope_theta"]
        assert (config.local_theta or config.rotary_theta) == local["rope_theta"]


# Other names of a family that has a case.
RENAMED = {"xlm-roberta": "roberta", "camembert": "roberta", "mt5": "t5"}


def test_every_family_has_a_case():
    """A case of test_family_forms or test_loading: "qwen2" or "qwen2-yarn" is of qwen2."""
    cases = [*CASES, *FORMS]
    missing = [
        name
        for name in pretrained.FAMILIES
        if not any(f"{case}-".startswith(f"{RENAMED.get(name, name)}-") for case in cases)
    ]
    assert missing == []


def test_depth_and_mlp_of_t5_are_those_of_the_part():
    """A decoder without a depth of its own has that of the encoder."""
    for entries, depths in (({}, (6, 6)), ({"num_layers": 4}, (4, 4))):
        for decoder, layers in ((None, depths), (3, (depths[0], 3))):
            settings = {"model_type": "t5", "num_decoder_layers": decoder} | entries
            parts = [pretrained.config_of(settings, part) for part in ("encoder", "decoder")]
            assert tuple(part.depth for part in parts) == layers
            assert [part.mask for part in parts] == ["none", "causal"]
            assert [part.cross_attention for part in parts] == [False, True]
    for name, kind in (
        ("relu", "relu"),
        ("gelu", "gelu"),
        ("gated-gelu", "geglu_tanh"),
        ("gated-silu", "swiglu"),
        ("gated-relu", "reglu"),
    ):
        settings = {"model_type": "t5", "feed_forward_proj": name}
        assert pretrained.config_of(settings).mlp == kind


def test_null_means_the_default_and_parts_are_checked():
    settings = pretrained.settings_of({"model_type": "bert", "hidden_size": None, "other": None})
    assert settings["hidden_size"] == 768 and settings["other"] is None
    theta = pretrained.settings_of({"model_type": "llama", "rope_theta": 500})["rope_theta"]
    assert isinstance(theta, float) and theta == 500
    assert pretrained.settings_of({"model_type": "t5"})["part"] == "encoder"
    assert pretrained.settings_of({"model_type": "mt5"}, "decoder")["part"] == "decoder"


@pytest.mark.parametrize(
    ("name", "positions"), [("bert", 20), ("roberta", 18), ("xlm-roberta", 18), ("camembert", 18)]
)
def test_roberta_keeps_rows_of_its_positions_for_padding(name, positions):
    config = pretrained.config_of(SMALL | {"model_type": name})
    assert config.embedding.num_positions == positions


def make_config(name, **entries):
    """Makes the configuration of four layers."""
    defaults = {"model_type": name, "num_hidden_layers": 4, "num_key_value_heads": 3} | SMALL
    return pretrained.config_of(defaults | entries)


def test_layers_with_a_window_have_a_rotary_base_of_their_own():
    for name, entry in (
        ("modernbert", "local_rope_theta"),
        ("gemma3_text", "rope_local_base_freq"),
    ):
        assert make_config(name, **{entry: 500.0}).local_theta == 500
        rotary = {"sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
        assert make_config(name, rope_parameters=rotary, **{entry: 500.0}).local_theta == 700
    assert make_config("gemma3_text", rope_theta=300.0).rotary_theta == 300


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_early_files_of_phi3_call_longrope_otherwise(kind):
    first = {"type": kind, "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [5.0] * 4}
    (_, short), (_, long) = make_config("phi3", rope_scaling=first).rotary_tables
    assert short == pytest.approx([1, 0.1 / 2, 0.01 / 3, 0.001 / 4])
    assert long == pytest.approx([1 / 5, 0.1 / 5, 0.01 / 5, 0.001 / 5])


def test_yarn_keeps_fast_waves_and_divides_slow_ones():
    """Fast: over 32 turns in the first training; slow: under one (Peng et al. 2023)."""
    first = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = make_config("llama", rope_scaling=first)
    ((_, frequencies),) = config.rotary_tables
    assert frequencies == pytest.approx([1, 0.1, 0.01 * (1 + 1 / 4) / 2, 0.001 / 4])
    assert config.rotary_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_images_are_cut_into_patches_row_by_row():
    settings = pretrained.settings_of(
        {"model_type": "vit", "image_size": [4, 6], "patch_size": 2, "num_channels": 3}
    )
    images = np.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    patches = image_patches(images, settings)
    assert patches.shape == (2, 6, 12)
    for place, (y, x) in enumerate((y, x) for y in (0, 2) for x in (0, 2, 4)):
        expected = images[:, :, y : y + 2, x : x + 2].reshape(2, -1)  # channel, y, x
        np.testing.assert_array_equal(patches[:, place], expected)
    bad = images.copy()
    bad[1, 2, 3, 4] = np.inf
    for wrong, message in (
        (images[0], r"images of shape \(3, 4, 6\) are not \[b, \(3, 4, 6\)\]"),
        (images[:, :2], r"images of shape \(2, 2, 4, 6\) are not"),
        (images[:0], r"images of shape \(0, 3, 4, 6\) are not"),
        (bad, "images hold values that are not finite"),
    ):
        is_refused(message, image_patches, wrong, settings)
    is_refused("patch size 3 does not divide an image of 4 x 6", cut_patches, images[0], 3)
    for sizes in ([8], [8, 2.0], [8, 0], [8, 2**31]):
        entries = {"model_type": "vit", "image_size": sizes}
        message = "is neither one whole number nor two"
        is_refused(message, pretrained.config_of, entries)


def test_the_hidden_width_of_dinov2_is_rounded_up_to_eights_where_it_is_gated():
    sizes = {"model_type": "dinov2", "hidden_size": 20, "num_attention_heads": 2}
    for ratio, gated, width in ((4, False, 80), (3, False, 60), (4, True, 56), (3, True, 40)):
        entries = sizes | {"mlp_ratio": ratio, "use_swiglu_ffn": gated}
        assert pretrained.config_of(entries).d_ff == width  # int(width * 2 / 3) is 53 and 40


def test_gpt2_divides_scores_by_the_number_of_the_layer():
    settings = {"model_type": "gpt2", "n_layer": 4, "n_head": 3, "n_embd": 24}
    assert pretrained.config_of(settings).temperature == 1
    divided = pretrained.config_of(settings | {"scale_attn_by_inverse_layer_idx": True})
    assert divided.temperature.tolist() == [1, 2, 3, 4]


def test_sliding_windows():
    """Entries of `windows` are distances, one less than what the models count; 0 for none."""

    def windows(name, **entries):
        return make_config(name, **{"sliding_window": 7} | entries).windows

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
    assert windows("olmo3") == windows("cohere2") == (6, 6, 6, 0)
    assert windows("cohere2", sliding_window_pattern=2) == (6, 0, 6, 0)
    assert windows("smollm3") == () and windows("smollm3", use_sliding_window=True) == (0, 0, 0, 6)
    assert windows("llama") == ()  # which transformers does not read either


def test_layers_without_positions():
    def rotary(name, **entries):
        return make_config(name, **entries).rotary_layers

    assert rotary("smollm3") == rotary("cohere2") == (True, True, True, False)
    assert rotary("smollm3", no_rope_layers=[0, 1, 1, 0, 1]) == (False, True, True, False)
    assert rotary("cohere2", layer_types=["full_attention"] * 4) == (False,) * 4
    assert rotary("llama") == ()


def test_a_decoder_of_bert_is_causal_and_attends_to_an_encoder_where_it_says_so():
    for entries, mask, cross in (
        ({}, "none", False),
        ({"add_cross_attention": True}, "none", False),
        ({"is_decoder": True}, "causal", False),
        ({"is_decoder": True, "add_cross_attention": True}, "causal", True),
    ):
        config = make_config("bert", **entries)
        assert (config.mask, config.cross_attention) == (mask, cross)


def test_tensors_that_a_checkpoint_may_lack_have_no_name():
    """Segments of BERT without types of tokens; a table of T5 that both of its parts share."""
    bert = pretrained.FAMILIES["bert"]
    for number in (0, 2):
        names = bert.names(None, {"type_vocab_size": number}).outside
        assert ("embedding.segments" in names) == (number > 0)
    settings = pretrained.settings_of({"model_type": "t5"}, "decoder")
    for held, expected in (
        (["shared.weight"], "shared.weight"),
        (["shared.weight", "decoder.embed_tokens.weight"], "decoder.embed_tokens.weight"),
        (["shared.weight", "encoder.embed_tokens.weight"], "shared.weight"),
    ):
        weights = SimpleNamespace(has_tensor=set(held).__contains__, is_random=False)
        names = pretrained.FAMILIES["t5"].names(weights, settings)
        assert names.outside["embedding.tokens"] == expected
        weights.is_random = True  # weights that are drawn have one table
        names = pretrained.FAMILIES["t5"].names(weights, settings)
        assert names.outside["embedding.tokens"] == "shared.weight"


def test_null_is_a_value_where_it_means_without():
    settings = {"model_type": "gemma2", "hidden_size": 24, "num_key_value_heads": 8}
    assert pretrained.config_of(settings).score_cap == 50.0
    assert pretrained.config_of(settings | {"attn_logit_softcapping": None}).score_cap == 0.0
    assert pretrained.config_of(settings | {"sliding_window": None}).windows == ()
    capped = {"model_type": "gemma2", "final_logit_softcapping": None}
    assert pretrained.settings_of(capped)["final_logit_softcapping"] is None
    assert pretrained.settings_of({"model_type": "gptj", "rotary_dim": None})["rotary_dim"] is None


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_the_number_of_experts_has_two_names(family, name):
    """transformers >= 5 writes another than earlier versions; d_ff is that of all experts."""
    entries = {"model_type": family, name: 6, "moe_intermediate_size": 10}
    shared = 7 if family == "qwen2_moe" else 0  # Qwen3 has no shared expert
    entries |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": shared}
    config = pretrained.config_of(entries)
    assert (config.num_experts, config.experts_per_token) == (6, 2)
    assert (config.d_ff, config.d_shared) == (6 * 10 + shared, shared)


def test_golden_configs(golden):
    """The network of every small model: fields that are not the default, and biases by map."""
    lines = []
    for name, case in (CASES | FORMS).items():
        entries = {"model_type": name.partition("-")[0]} | case.config
        family = pretrained.FAMILIES[entries["model_type"]]
        for part in family.parts or (None,):
            config = pretrained.config_of(entries, part)
            changed = {k: v for k, v in flat(config).items() if repr(v) != repr(DEFAULTS[k])}
            lines.append(f"{name} {part or ''}: {changed}")
            settings = pretrained.settings_of(entries, part)
            kinds = ("q", "k", "v", "qkv", "o", "in", "gate", "gate_in", "out", "norm", "head")
            biased = [kind for kind in kinds if family._has_bias(settings, config, kind)]
            lines.append(f"{name} has biases of {' '.join(biased)}")
    golden("settings/pretrained_families.txt", "\n".join(lines))


def test_activations_are_those_of_transformers_of_these_names():
    torch, x = pytest.importorskip("torch"), np.linspace(-4, 4, 33, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("transformers.activations").ACT2FN
    for name, kind in [*ACTIVATIONS.items(), *GATES.items()]:
        expected = theirs[name](torch.from_numpy(x)).numpy()
        values = np.asarray(get_activation(kind).fn(jnp.asarray(x)))
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=2e-6, err_msg=name)
