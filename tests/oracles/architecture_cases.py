"""Small models of every family: classes of `transformers` and the entries of their configs."""

from typing import Any, NamedTuple

VOCAB = 40
SMALL = {"hidden_size": 24, "num_attention_heads": 3, "max_position_embeddings": 20}
SIZES = SMALL | {"vocab_size": VOCAB, "num_hidden_layers": 2, "intermediate_size": 28}
LLAMA = SIZES | {"num_attention_heads": 6, "pad_token_id": 0}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 28,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 20,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
XLNET = {"vocab_size": VOCAB, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 28}
DISTIL = {"vocab_size": VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 28}
IMAGES = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
IMAGES |= {"image_size": 8, "patch_size": 4, "num_channels": 2}
ALBERT = SIZES | {"embedding_size": 10, "hidden_act": "gelu_new"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


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
    "vit": Case("ViTModel", IMAGES | {"qkv_bias": False}),
    "vit-wide": Case(
        "ViTForImageClassification",
        IMAGES | {"image_size": [4, 8], "patch_size": 2, "num_channels": 6},  # patches as wide as d
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
WINDOW = {"sliding_window": 4}
THREE = LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3}  # heads of width 8
DINO = {k: v for k, v in IMAGES.items() if k != "intermediate_size"} | {"mlp_ratio": 2}
EXPERTS = LLAMA | {"num_key_value_heads": 2, "intermediate_size": 12}
QWEN_EXPERTS = EXPERTS | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
MODERN = SIZES | {
    "local_attention": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
WHISPER = {
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 28,
    "decoder_layers": 1,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 28,
    "num_mel_bins": 5,
    "max_source_positions": 6,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 5.0],
}

# One of each kind of network beyond the plain ones. The usual run has those without a "-".
FORMS = {
    "qwen3": Case("Qwen3ForCausalLM", LLAMA | {"num_key_value_heads": 2, "head_dim": 6}, "sharded"),
    "qwen3-windows, dynamic": Case(
        "Qwen3Model",
        LLAMA
        | {"num_key_value_heads": 3, "head_dim": 8, "attention_bias": True}
        | {"use_sliding_window": True, "max_window_layers": 1, "rope_parameters": DYNAMIC}
        | WINDOW
        | {"max_position_embeddings": 6},
    ),
    "qwen2-yarn": Case("Qwen2ForCausalLM", THREE | {"rope_parameters": YARN}),
    "mistral-window": Case("MistralForCausalLM", LLAMA | {"num_key_value_heads": 2} | WINDOW),
    "phi3": Case(
        "Phi3ForCausalLM",
        THREE
        | {"rope_parameters": LONG, "num_key_value_heads": 1}
        | {"original_max_position_embeddings": 6},
        "sharded",
    ),
    "phi3-short": Case(
        "Phi3Model",
        THREE | {"rope_parameters": LONG, "original_max_position_embeddings": 12} | WINDOW,
        "bin",
    ),
    "gpt_neox": Case("GPTNeoXForCausalLM", SIZES),
    "gpt_neox-serial": Case(
        "GPTNeoXModel",
        SIZES
        | {"use_parallel_residual": False, "hidden_act": "gelu_new", "attention_bias": False}
        | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        "bin",
    ),
    "olmo2": Case("Olmo2ForCausalLM", LLAMA | {"num_key_value_heads": 2}, "sharded"),
    "olmo2-biased": Case("Olmo2Model", LLAMA | {"attention_bias": True, "rope_parameters": LLAMA3}),
    "olmo3": Case(
        "Olmo3ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 9.0}}}
        | WINDOW,
        "sharded",
    ),
    "olmo3-plain": Case("Olmo3Model", LLAMA | WINDOW | {"num_hidden_layers": 5}),
    "granite": Case(
        "GraniteForCausalLM",
        LLAMA
        | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 4.0}
        | {"attention_multiplier": 0.2},
    ),
    "granite-plain": Case("GraniteModel", LLAMA, "sharded"),
    "smollm3": Case(
        "SmolLM3ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 2, "no_rope_layers": [1, 0], "use_sliding_window": True}
        | WINDOW,
    ),
    "smollm3-plain": Case(
        "SmolLM3Model",
        LLAMA
        | {"num_hidden_layers": 5, "num_key_value_heads": 6, "rope_parameters": LLAMA3}
        | {"attention_bias": True, "mlp_bias": True},
        "sharded",
    ),
    "stablelm": Case(
        "StableLmForCausalLM",
        THREE | {"num_key_value_heads": 1, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm-serial": Case(
        "StableLmModel",
        THREE | {"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5}},
        "sharded",
    ),
    "cohere": Case("CohereForCausalLM", LLAMA | {"num_key_value_heads": 2, "logit_scale": 0.3}),
    "cohere-biased": Case("CohereModel", LLAMA | {"attention_bias": True}, "sharded"),
    "cohere2": Case(
        "Cohere2ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | WINDOW,
    ),
    "cohere2-plain": Case(
        "Cohere2Model",
        LLAMA | {"num_hidden_layers": 5, "num_key_value_heads": 6, "attention_bias": True} | WINDOW,
        "sharded",
    ),
    "gptj": Case("GPTJForCausalLM", GPT2 | {"rotary_dim": 4, "n_inner": 28}, "sharded"),
    "gptj-whole": Case("GPTJModel", GPT2 | {"rotary_dim": 8, "activation_function": "relu"}, "bin"),
    "phi": Case("PhiForCausalLM", THREE | {"num_key_value_heads": 1}),
    "phi-linear": Case(
        "PhiModel",
        THREE
        | {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}
        },
        "sharded",
    ),
    "gemma": Case("GemmaForCausalLM", LLAMA | {"num_key_value_heads": 2, "head_dim": 6}, "sharded"),
    "gemma-biased": Case(
        "GemmaModel",
        LLAMA
        | {"num_key_value_heads": 1, "head_dim": 8, "hidden_act": "gelu"}
        | {"attention_bias": True},
    ),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 2, "head_dim": 6, "query_pre_attn_scalar": 10}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3}
        | WINDOW,
    ),
    "gemma2-uncapped": Case(
        "Gemma2Model",
        LLAMA
        | {"num_key_value_heads": 3, "head_dim": 4, "attn_logit_softcapping": None}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "attention_bias": True},
        "sharded",
    ),
    "gemma3_text": Case(
        "Gemma3ForCausalLM",
        LLAMA
        | {"num_key_value_heads": 2, "head_dim": 6, "query_pre_attn_scalar": 10}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            }
        }
        | WINDOW,
        "sharded",
    ),
    "gemma3_text-plain": Case(
        "Gemma3TextModel",
        LLAMA | {"num_hidden_layers": 7, "head_dim": 4, "num_key_value_heads": 6} | WINDOW,
    ),
    "mixtral": Case("MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}, "sharded"),
    "mixtral-one": Case(
        "MixtralModel", EXPERTS | {"num_local_experts": 3, "num_experts_per_tok": 1} | WINDOW
    ),
    "qwen2_moe": Case("Qwen2MoeForCausalLM", QWEN_EXPERTS | {"shared_expert_intermediate_size": 8}),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", QWEN_EXPERTS | {"norm_topk_prob": True}),
    "modernbert": Case("ModernBertModel", MODERN, "sharded"),
    "modernbert-biased": Case(
        "ModernBertForMaskedLM",
        MODERN
        | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 4}
        | {"global_attn_every_n_layers": 2},
    ),
    "deit": Case("DeiTForImageClassification", IMAGES),
    "deit-bare": Case("DeiTModel", IMAGES | {"qkv_bias": False, "image_size": [4, 8]}),
    "dinov2": Case("Dinov2ForImageClassification", DINO | {"use_swiglu_ffn": True}),
    "dinov2_with_registers": Case(
        "Dinov2WithRegistersModel", DINO | {"num_register_tokens": 3, "layerscale_value": 0.5}
    ),
    "whisper": Case("WhisperForConditionalGeneration", WHISPER),
    "whisper-bare": Case("WhisperModel", WHISPER, "sharded"),
}
# What a run without torch reads back: one of each family and of each file format.
GOLDEN = (
    "bert",
    "bert-untied",
    "bert-legacy",
    "roberta",
    "albert-groups",
    "xlnet",
    "distilbert",
    "t5-gated",
    "gpt2-head",
    "vit-wide",
    "llama-grouped",
    "qwen2",
)
