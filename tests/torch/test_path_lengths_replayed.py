"""`path_lengths` of models of transformers that `rc.pretrained` need not know."""

import importlib
import re

import pytest

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")

from rank_collapse.torch import path_lengths  # noqa: E402
from tests.oracles.replayed_torch import replayed_sums  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402

IMAGES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGES |= {"intermediate_size": 48}
SMALL = {"image_size": 8, "patch_size": 4}
TEXTS = IMAGES | {"vocab_size": 50}
BERT = TEXTS | {"max_position_embeddings": 40}
GROUPED = TEXTS | {"num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OPT = BERT | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}
DISENTANGLED = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
WHISPER = SPECIAL | {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 4}
WHISPER |= {"encoder_ffn_dim": 48, "vocab_size": 50, "num_mel_bins": 8, "max_source_positions": 7}
WAVES = TEXTS | SPECIAL | {"conv_dim": [16, 16], "conv_kernel": [4, 3], "conv_stride": [2, 2]}
WAVES |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
LAYERS, BERT_LAYERS = r"layers\.\d+\.self_attn", r"encoder\.layer\.\d+\.attention\.self"

# model: (name of its classes, entries of its config, branches, the end of the start's path,
# whether its MLP is gated)
MODELS = {
    "gemma2": ("Gemma2", GROUPED | {"head_dim": 8, "sliding_window": 4}, LAYERS, "tokens", True),
    "granite": (
        "Granite",
        GROUPED | SPECIAL | {"residual_multiplier": 0.5},
        LAYERS,
        "tokens",
        True,
    ),
    "cohere": ("Cohere", GROUPED | SPECIAL | {"use_qk_norm": True}, LAYERS, "tokens", True),
    "falcon": (
        "Falcon",
        TEXTS | {"multi_query": True, "bias": True},
        *(r"h\.\d+\.self_attention", "word_embeddings", False),
    ),
    "falcon with alibi": (
        "Falcon",
        TEXTS | {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        *(r"h\.\d+\.self_attention", "word_embeddings", False),
    ),
    "opt": ("OPT", OPT, r"decoder\.layers\.\d+\.self_attn", "embed_tokens", False),
    "mpt": (
        "Mpt",
        {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 50, "expansion_ratio": 2},
        *(r"blocks\.\d+\.attn", "wte", False),
    ),
    "starcoder2": ("Starcoder2", GROUPED | SPECIAL, LAYERS, "tokens", False),
    "phi": ("Phi", TEXTS | SPECIAL | {"partial_rotary_factor": 0.5}, LAYERS, "tokens", False),
    "stablelm": ("StableLm", GROUPED | SPECIAL | {"use_qkv_bias": True}, LAYERS, "tokens", True),
    "bloom": (
        "Bloom",
        {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50},
        *(r"h\.\d+\.self_attention\.dense", "word_embeddings_layernorm", False),
    ),
    "electra": ("Electra", BERT | {"embedding_size": 16}, BERT_LAYERS, "embeddings", False),
    "deberta": ("Deberta", DISENTANGLED, BERT_LAYERS, "embeddings", False),
    "deberta-v2": (
        "DebertaV2",
        DISENTANGLED | {"position_buckets": 8, "share_att_key": True},
        *(BERT_LAYERS, "embeddings", False),
    ),
    "xlm-roberta-xl": ("XLMRobertaXL", BERT, BERT_LAYERS, "embeddings", False),
    "mobilebert": (
        "MobileBert",
        BERT | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        *(BERT_LAYERS, "embeddings", False),
    ),
    "clip's text": ("CLIPText", BERT | SPECIAL, ".*" + LAYERS, "embeddings", False),
    "siglip's images": ("SiglipVision", IMAGES | SMALL, ".*" + LAYERS, "embeddings", False),
    "whisper's encoder": ("Whisper", WHISPER, LAYERS, "conv2", False),
    "wav2vec2": ("Wav2Vec2", WAVES, r"encoder\.layers\.\d+\.attention", "n.projection", False),
    "beit": (
        "Beit",
        IMAGES | SMALL | {"use_relative_position_bias": True, "layer_scale_init_value": 0.5},
        *(r".*layers?\.\d+\.attention", "embeddings", False),
    ),
    "swin": (
        "Swin",
        SWIN | {"window_size": 4},
        *(r"encoder\.layers\.\d+\.blocks\.\d+\.attention", "embeddings", False),
    ),
}


def make_model(name):
    """Returns a small model in float64, with weights and biases that show in every part."""
    classes, entries, *_ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(T, f"{classes}Config")(**entries)
    config._attn_implementation = "eager"
    whisper = importlib.import_module("transformers.models.whisper.modeling_whisper")
    is_whisper = classes == "Whisper"
    model_class = whisper.WhisperEncoder if is_whisper else getattr(T, f"{classes}Model")
    model = model_class(config).eval().double()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * (0.02 if p.ndim > 1 else 0.2))
        p.data.mul_(3 if p.ndim > 1 else 1)
    return model


def make_inputs(model):
    """Draws inputs of a model."""
    torch.manual_seed(1)
    name, width = model.main_input_name, {"dtype": torch.float64}
    if name == "input_ids":
        return {name: torch.randint(3, 50, (1, 7))}
    if name == "pixel_values":
        size = model.config.image_size
        return {name: torch.randn(1, 3, size, size, **width)}
    shape = (1, 8, 14) if name == "input_features" else (1, 60)
    return {name: torch.randn(*shape, **width)}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_path_lengths_are_those_of_repeated_runs(name):
    _, _, branches, end, is_gated = MODELS[name]
    model = make_model(name)
    inputs, modules = make_inputs(model), dict(model.named_modules())
    start = next(path for path in modules if path.endswith(end))
    matching = [module for path, module in modules.items() if re.fullmatch(branches, path)]
    sums, output = replayed_sums(model, inputs, modules[start], matching, freezes_gates=is_gated)
    result = path_lengths(model, branches=branches, start=start, **inputs)
    # Norms and softmax of some families are in float32, and the oracle's subtraction shows it.
    assert_close(result.by_length, sums, atol=2e-5 * abs(sums).max())
    assert_close(result.output, output, atol=1e-6)
    assert len(sums) == len(matching) + 1 >= 4
    assert all(abs(part).max() > 1e-4 for part in sums)
