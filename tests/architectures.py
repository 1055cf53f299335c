"""Small random checkpoints of every family, made and run by `transformers`: tests' other side.

Imported only where torch and transformers are installed.
"""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 40
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "intermediate_size": 28}
SIZES |= {"hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 20}
LLAMA = SIZES | {"num_attention_heads": 6, "pad_token_id": 0}
T5 = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 5, "d_ff": 28, "num_layers": 2, "num_heads": 3}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
T5 |= {"decoder_start_token_id": 0}
GPT2 = {"vocab_size": VOCAB, "n_positions": 20, "n_embd": 24, "n_layer": 3, "n_head": 3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
XLNET = {"vocab_size": VOCAB, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 28}
DISTIL = {"vocab_size": VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 28}
ALBERT = SIZES | {"embedding_size": 10, "hidden_act": "gelu_new"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}


class Case(NamedTuple):
    """A model class, the entries of its config, and how it is saved."""

    model: str
    config: dict[str, Any]
    saved: str = "safetensors"  # "sharded", "bin", "legacy" or "sharded-bin"


CASES = {
    "bert": Case("BertModel", SIZES),
    "bert-head": Case("BertForMaskedLM", SIZES | {"hidden_act": "relu"}, "sharded"),
    "bert-untied": Case("BertForMaskedLM", SIZES | {"tie_word_embeddings": False}, "bin"),
    "bert-legacy": Case("BertForSequenceClassification", SIZES, "legacy"),
    "bert-one-head": Case("BertModel", SIZES | {"num_attention_heads": 1}),
    "roberta": Case("RobertaModel", SIZES | {"pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "roberta-head": Case("RobertaForMaskedLM", SIZES | {"type_vocab_size": 1}, "sharded-bin"),
    "albert": Case("AlbertModel", ALBERT),
    "albert-groups": Case(
        "AlbertForMaskedLM",
        ALBERT | {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "xlnet": Case("XLNetModel", XLNET),
    "xlnet-clamped": Case("XLNetLMHeadModel", XLNET | {"clamp_len": 3, "ff_activation": "relu"}),
    "xlnet-causal": Case("XLNetModel", XLNET | {"attn_type": "uni"}, "bin"),
    "distilbert": Case("DistilBertModel", DISTIL),
    "distilbert-head": Case(
        "DistilBertForMaskedLM", DISTIL | {"sinusoidal_pos_embds": True, "activation": "relu"}
    ),
    "t5": Case("T5Model", T5),
    "t5-gated": Case(
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "sharded",
    ),
    "t5-shallow": Case("T5ForConditionalGeneration", T5 | {"num_decoder_layers": 1}, "bin"),
    "gpt2": Case("GPT2Model", GPT2),
    "gpt2-head": Case("GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": Case("GPT2Model", GPT2 | {"scale_attn_weights": False, "n_inner": 20}),
    "vit": Case(
        "ViTModel",
        {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
        | {"image_size": 8, "patch_size": 4, "num_channels": 2, "qkv_bias": False},
    ),
    "vit-wide": Case(
        "ViTForImageClassification",
        {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
        | {"image_size": [4, 8], "patch_size": 2, "num_channels": 6},  # patches as wide as d
    ),
    "llama": Case("LlamaModel", LLAMA),
    "llama-grouped": Case(
        "LlamaForCausalLM",
        LLAMA | {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
        "sharded",
    ),
    "llama-biased": Case(
        "LlamaForCausalLM",
        LLAMA
        | {"attention_bias": True, "mlp_bias": True, "head_dim": 6}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    ),
    "qwen2": Case("Qwen2ForCausalLM", LLAMA | {"num_key_value_heads": 3}),
    "mistral": Case("MistralModel", LLAMA | {"num_key_value_heads": 2}),
}
# What a run without torch reads back: one of each family and of each file format.
GOLDEN = ("bert", "bert-untied", "bert-legacy", "roberta", "albert-groups", "xlnet", "distilbert")
GOLDEN += ("t5-gated", "gpt2-head", "vit-wide", "llama-grouped", "qwen2")


def build(case: Case, seed: int = 0) -> Any:
    """The model, its weights disturbed so that no bias is zero and no gain is one."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, case.model)
    config = model_class.config_class(**case.config)
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def save(model: Any, folder: Path, how: str = "safetensors") -> None:
    """The model as a checkpoint folder of one of the formats."""
    if how in ("safetensors", "sharded"):
        size = {"max_shard_size": "12KB"} if how == "sharded" else {}
        model.save_pretrained(folder, **size)
        return
    model.config.save_pretrained(folder)
    state = model.state_dict()
    modern = how != "legacy"
    if how != "sharded-bin":
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=modern)
        return
    names, weight_map = list(state), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({n: state[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def inputs(model: Any, seed: int = 1, n: int = 9) -> dict[str, np.ndarray]:
    """Two texts (or images), one of them padded, as the model's keyword arguments."""
    rng = np.random.default_rng(seed)
    config = model.config
    if config.model_type == "vit":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (2, config.num_channels, height, width)
        return {"pixel_values": rng.standard_normal(shape).astype(np.float32)}

    def text(n, real):
        ids = rng.integers(3, config.vocab_size, (2, n))
        mask = np.ones((2, n), np.int64)
        mask[1, real:] = 0
        ids[1, real:] = getattr(config, "pad_token_id", None) or 0
        return ids, mask

    ids, mask = text(n, max(n - 3, 1))
    out = {"input_ids": ids, "attention_mask": mask}
    if has_decoder_part(model):
        ids, mask = text(n - 2, n - 4)
        out |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return out


def base(model: Any) -> Any:
    """The model without its head."""
    return model.base_model


def has_decoder_part(model: Any) -> bool:
    """Whether the model is an encoder with a decoder; T5's encoder is also saved alone."""
    return hasattr(base(model), "encoder") and hasattr(base(model), "decoder")


def run(model: Any, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hidden states [b, L+1, n, d] and attentions [b, L, h, n, n], by part for T5."""
    if getattr(model.config, "attn_type", "bi") == "uni" and len(arguments["input_ids"]) > 1:
        # The causal mask of XLNet in transformers admits one text at a time.
        each = [run(model, {k: v[i : i + 1] for k, v in arguments.items()}) for i in range(2)]
        return {name: np.concatenate([e[name] for e in each]) for name in each[0]}
    tensors = {k: torch.from_numpy(v) for k, v in arguments.items()}
    with torch.no_grad():
        out = base(model)(**tensors, output_hidden_states=True, output_attentions=True)

    def stacked(layers):
        return torch.stack(tuple(layers), dim=1).numpy()

    if not has_decoder_part(model):
        return {"hidden": stacked(out.hidden_states), "attention": stacked(out.attentions)}
    return {
        "hidden": stacked(out.encoder_hidden_states),
        "attention": stacked(out.encoder_attentions),
        "decoder_hidden": stacked(out.decoder_hidden_states),
        "decoder_attention": stacked(out.decoder_attentions),
        "cross_attention": stacked(out.cross_attentions),
    }
