"""Small random models of many kinds, and where their attention stands, for the tests of `watch`.

What each attention reads and its weights come from a second model with the same parameters: weights
are those that transformers returns of eager attention, or of a formula here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
transformers = pytest.importorskip("transformers")

L, B, N, V = 2, 3, 9, 60
LENGTHS = torch.tensor([N, 6, 4])
MASKS = {
    "no": torch.ones(B, N, dtype=torch.long),
    "right": (torch.arange(N)[None] < LENGTHS[:, None]).long(),
    "left": (torch.arange(N)[None] >= N - LENGTHS[:, None]).long(),
}
IDS = (torch.arange(B * N).reshape(B, N) * 7) % (V - 5) + 3
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of model.

    Attributes:
        kind: The `model_type` of transformers.
        model: Its class.
        where: The dotted name of a layer's attention, with {} for its number.
        sizes: Added to `SIZES`, or in place of its entries.
        layers: As `watch` takes it.
        attentions: The field of the output that has the weights.
        implementations: Of the attention.
        padding: Which masks it takes.
        inputs: Makes the model's inputs from a mask.
        left_out: Part of the reason why weights are not measured.
    """

    kind: str
    model: str
    where: str
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: str | None = None
    attentions: str = "attentions"
    implementations: tuple[str, ...] = ("eager", "sdpa")
    padding: tuple[str, ...] = ("no", "right", "left")
    inputs: Callable[..., dict[str, Any]] | None = None
    left_out: str = ""
    name: str = ""

    def __str__(self):
        return self.name or self.kind


def texts(mask):
    return {"input_ids": IDS, "attention_mask": mask}


def two_texts(mask):
    return {**texts(mask), "decoder_input_ids": IDS[:, :7]}


def images(size=16):
    pixels = torch.randn(B, 3, size, size, generator=torch.Generator().manual_seed(0))
    return lambda mask: {"pixel_values": pixels}


GPT2 = {
    "n_embd": 32, "n_layer": L, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "n_inner": 48,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": L, "num_decoder_layers": L, "num_heads": 4,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": L, "decoder_layers": L, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    "activation_dropout": 0.0, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3}
FEW = {"num_key_value_heads": 2, "head_dim": 8}

CASES = (
    Case("gpt2", "GPT2LMHeadModel", "transformer.h.{}.attn", GPT2),
    Case("gpt_bigcode", "GPTBigCodeForCausalLM", "transformer.h.{}.attn", GPT2),
    Case("gpt_bigcode", "GPTBigCodeForCausalLM", "transformer.h.{}.attn",
         {**GPT2, "multi_query": False}, name="gpt_bigcode_many"),
    Case("bloom", "BloomForCausalLM", "transformer.h.{}.self_attention",
         {"n_head": 4, "n_layer": L}, implementations=("eager",)),
    Case("falcon", "FalconForCausalLM", "transformer.h.{}.self_attention",
         {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    Case("falcon", "FalconForCausalLM", "transformer.h.{}.self_attention",
         {"multi_query": True, "alibi": False}, name="falcon_one_key"),
    Case("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.layers.{}.attention"),
    Case("phi3", "Phi3ForCausalLM", "model.layers.{}.self_attn",
         {"num_key_value_heads": 2, "resid_pdrop": 0.0}),
    Case("llama", "LlamaForCausalLM", "model.layers.{}.self_attn", FEW),
    Case("mistral", "MistralForCausalLM", "model.layers.{}.self_attn",
         {**FEW, "sliding_window": 4}),
    Case("gemma2", "Gemma2ForCausalLM", "model.layers.{}.self_attn", {**FEW, "sliding_window": 4},
         implementations=("eager",)),
    Case("gpt_oss", "GptOssForCausalLM", "model.layers.{}.self_attn",
         {**FEW, "num_local_experts": 2, "num_experts_per_tok": 1}, implementations=("eager",)),
    Case("deepseek_v3", "DeepseekV3ForCausalLM", "model.layers.{}.self_attn",
         {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": L}),
    Case("opt", "OPTForCausalLM", "model.decoder.layers.{}.self_attn",
         {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    Case("codegen", "CodeGenForCausalLM", "transformer.h.{}.attn", {**GPT2, "rotary_dim": 4},
         implementations=("eager",)),
    Case("bert", "BertForMaskedLM", "bert.encoder.layer.{}.attention.self"),
    Case("distilbert", "DistilBertForMaskedLM", "distilbert.transformer.layer.{}.attention",
         {"dim": 32, "n_layers": L, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0}),
    Case("deberta", "DebertaForMaskedLM", "deberta.encoder.layer.{}.attention.self",
         {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, implementations=("eager",)),
    Case("deberta-v2", "DebertaV2ForMaskedLM", "deberta.encoder.layer.{}.attention.self",
         {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, implementations=("eager",)),
    Case("modernbert", "ModernBertForMaskedLM", "model.layers.{}.attn",
         {"local_attention": 4, "global_attn_every_n_layers": 2, "mlp_dropout": 0.0,
          "embedding_dropout": 0.0, "cls_token_id": 1, "sep_token_id": 2}),
    Case("nomic_bert", "NomicBertForMaskedLM", "nomic_bert.layers.{}.self_attn",
         {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    Case("xlnet", "XLNetLMHeadModel", "transformer.layer.{}.rel_attn",
         {"d_model": 32, "n_layer": L, "n_head": 4, "d_inner": 48, "dropout": 0.0,
          "max_position_embeddings": ...},
         implementations=("eager",)),
    Case("t5", "T5ForConditionalGeneration", "encoder.block.{}.layer.0.SelfAttention", T5,
         "encoder.block", "encoder_attentions", inputs=two_texts, name="t5_encoder"),
    Case("t5", "T5ForConditionalGeneration", "decoder.block.{}.layer.0.SelfAttention", T5,
         "decoder.block", "decoder_attentions", inputs=two_texts, name="t5_decoder"),
    Case("umt5", "UMT5ForConditionalGeneration", "encoder.block.{}.layer.0.SelfAttention", T5,
         "encoder.block", "encoder_attentions", inputs=two_texts),
    Case("bart", "BartForConditionalGeneration", "model.encoder.layers.{}.self_attn", BART,
         "model.encoder.layers", "encoder_attentions", inputs=two_texts, name="bart_encoder"),
    Case("bart", "BartForConditionalGeneration", "model.decoder.layers.{}.self_attn", BART,
         "model.decoder.layers", "decoder_attentions", inputs=two_texts, name="bart_decoder"),
    Case("whisper", "WhisperForConditionalGeneration", "model.encoder.layers.{}.self_attn",
         {**BART, "num_mel_bins": 6, "max_source_positions": 8, "max_target_positions": 16},
         "model.encoder", "encoder_attentions", padding=("no",), inputs=lambda mask: {
             "input_features": torch.randn(B, 6, 16, generator=torch.Generator().manual_seed(0)),
             "decoder_input_ids": IDS[:, :7]}),
    Case("clip_text_model", "CLIPTextModel", "encoder.layers.{}.self_attn"),
    Case("clip_vision_model", "CLIPVisionModel", "encoder.layers.{}.self_attn", VISION,
         padding=("no",), inputs=images()),
    Case("siglip_vision_model", "SiglipVisionModel", "encoder.layers.{}.self_attn", VISION,
         padding=("no",), inputs=images()),
    Case("vit", "ViTModel", "layers.{}.attention", VISION, padding=("no",), inputs=images()),
    Case("dinov2", "Dinov2Model", "encoder.layer.{}.attention", VISION, padding=("no",),
         inputs=images()),
    Case("swin", "SwinModel", "encoder.layers.{}.blocks.0.attention",
         {**VISION, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2],
          "num_attention_heads": ..., "num_hidden_layers": ..., "hidden_size": ...,
          "window_size": 4}, padding=("no",), inputs=images()),
    Case("albert", "AlbertForMaskedLM", "albert.encoder.albert_layer_groups.0.albert_layers.0"
         ".attention", {"embedding_size": 16}),
    Case("qwen3_next", "Qwen3NextForCausalLM", "model.layers.{}.self_attn",
         {**FEW, "layer_types": ["full_attention", "full_attention"], "num_experts": 2,
          "num_experts_per_tok": 1, "moe_intermediate_size": 16,
          "shared_expert_intermediate_size": 16}),
    Case("wav2vec2-conformer", "Wav2Vec2ConformerModel", "encoder.layers.{}.self_attn",
         {"conv_dim": [8], "conv_stride": [4], "conv_kernel": [4], "feat_proj_dropout": 0.0,
          "activation_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
          "position_embeddings_type": "relative", "conformer_conv_dropout": 0.0},
         implementations=("eager",), padding=("no",), inputs=lambda mask: {
             "input_values": torch.randn(B, 40, generator=torch.Generator().manual_seed(0))}),
    Case("longformer", "LongformerForMaskedLM", "longformer.encoder.layer.{}.attention.self",
         {"attention_window": [4, 4]}, implementations=("eager",),
         left_out="no weights", inputs=lambda mask: {
             "input_ids": IDS[:, :8], "attention_mask": mask[:, :8]}),
)  # fmt: skip


def build(case: Case, implementation: str, **sizes):
    """Builds the model of a case in training mode, the same at every call."""
    torch.manual_seed(0)
    fields = {**SIZES, **case.sizes, **sizes}
    fields = {name: value for name, value in fields.items() if value is not ...}
    config = transformers.AutoConfig.for_model(case.kind, **fields)
    model = getattr(transformers, case.model)._from_config(
        config, attn_implementation=implementation
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:  # weights that tell keys apart
                p.mul_(6 if p.abs().max() < 0.2 else 1.5)
    return model.train()


def make_inputs(case, padding):
    return (case.inputs or texts)(MASKS[padding])


def measure_loss(output):
    first = next(a for a in output.to_tuple() if torch.is_tensor(a) and a.is_floating_point())
    return first.square().mean()
