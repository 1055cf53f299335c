"""`path_lengths` of models of transformers, against our own networks of the same weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")

import rank_collapse as rc  # noqa: E402
from rank_collapse.pretrained.families.vit import cut_patches  # noqa: E402
from rank_collapse.torch import path_lengths  # noqa: E402
from tests.support.closeness import assert_close  # noqa: E402

IMAGES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGES |= {"image_size": 8, "patch_size": 4}
TEXTS = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXTS |= {"intermediate_size": 48, "vocab_size": 50}
BERT = TEXTS | {"max_position_embeddings": 40}
GROUPED = TEXTS | {"num_key_value_heads": 2}
LAYERS = (r"layers\.\d+\.self_attn", r"layers\.\d+\.mlp", "embed_tokens")
BERT_LAYERS = (r"encoder\.layer\.\d+\.attention\.self", r"encoder\.layer\.\d+\.output\.dense")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# family: (name of its classes, entries of its config, branches of attention and MLP, start)
FAMILIES = {
    "llama": ("Llama", GROUPED, *LAYERS),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}, *LAYERS),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 4}, *LAYERS),
    "gemma3": ("Gemma3Text", GROUPED | {"head_dim": 8}, *LAYERS),
    "phi3": ("Phi3", GROUPED | SPECIAL, *LAYERS),
    "olmo2": ("Olmo2", TEXTS, *LAYERS),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4}, *LAYERS),
    "qwen2-moe": (
        "Qwen2Moe",
        GROUPED
        | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
        | {"shared_expert_intermediate_size": 16, "mlp_only_layers": []},
        *LAYERS,
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 32},
        *(r"h\.\d+\.attn", r"h\.\d+\.mlp", "drop"),
    ),
    "gpt-neox": ("GPTNeoX", TEXTS, r"layers\.\d+\.attention", r"layers\.\d+\.mlp", "embed_in"),
    "bert": ("Bert", BERT, *BERT_LAYERS, "embeddings"),
    "roberta": ("Roberta", BERT, *BERT_LAYERS, "embeddings"),
    "albert": (
        "Albert",
        BERT | {"embedding_size": 16},
        *(r"encoder\..*\.attention\.dense", r"encoder\..*\.ffn_output"),
        "encoder.embedding_hidden_mapping_in",
    ),
    "modernbert": (
        "ModernBert",
        TEXTS | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 6},
        *(r"layers\.\d+\.attn", r"layers\.\d+\.mlp", "embeddings"),
    ),
    "vit": (
        "ViT",
        IMAGES | {"intermediate_size": 48},
        *(r"layers\.\d+\.attention", r"layers\.\d+\.mlp", "embeddings"),
    ),
    "dinov2": (
        "Dinov2",
        IMAGES | {"mlp_ratio": 2, "layerscale_value": 0.5},
        *(r"encoder\.layer\.\d+\.attention", r"encoder\.layer\.\d+\.mlp", "embeddings"),
    ),
    "t5": (
        "T5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 50},
        *(r"encoder\..*\.SelfAttention", r"encoder\..*\.DenseReluDense", "encoder.embed_tokens"),
    ),
}


def make_model(family):
    """Returns a small model with weights and biases that show in every part."""
    name, entries, *_ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(T, f"{name}Config")(**entries)
    model_class = getattr(T, f"{name}EncoderModel" if name == "T5" else f"{name}Model")
    options = {"add_pooling_layer": False} if name in ("Bert", "Roberta", "Albert", "ViT") else {}
    model = model_class(config, **options).eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * (0.02 if p.ndim > 1 else 0.2))
        p.data.mul_(3 if p.ndim > 1 else 1)
    return model


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_path_lengths_are_those_of_our_own_network(family):
    *_, attention, mlp, start = FAMILIES[family]
    model = make_model(family)
    if family in ("vit", "dinov2"):
        images = torch.randn(1, 3, 8, 8)
        inputs, x = {"pixel_values": images}, cut_patches(np.asarray(images[0]), 4)
    else:
        ids = torch.randint(3, 50, (1, 7))
        inputs, x = {"input_ids": ids}, np.asarray(ids[0])
    params_and_config = rc.pretrained.load(model)
    config, params = params_and_config[:2]
    expected = rc.path_contributions(params, x, config, count_mlps=True)
    branches = {"attention": attention, "mlp": mlp}
    contributions = path_lengths(model, branches=branches, start=start, **inputs)
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert_close(contributions.by_length[:, :, 0], expected.by_length, **close)
    assert_close(contributions.offset[0], expected.offset, **close)
    assert_close(contributions.output[0], expected.output, **close)
    one_axis = path_lengths(model, branches=attention, start=start, **inputs)
    assert one_axis.output_name == "last_hidden_state"
    torch.testing.assert_close(one_axis.by_length, contributions.by_length.sum(1), **close)
