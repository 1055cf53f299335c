"""Makes and runs small random checkpoints of every family by `transformers`, to compare with.

Imported only where torch and transformers are installed.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.architecture_cases import (
    CASES as CASES,
    FORMS as FORMS,
    GOLDEN as GOLDEN,
    GPT2 as GPT2,
    LONG as LONG,
    T5 as T5,
    Case,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def build(case: Case, seed: int = 0) -> Any:
    """Builds the model and disturbs its weights: no bias stays zero, and no gain one."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, case.model)
    config = model_class.config_class(**case.config)
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def save(model: Any, folder: Path, file_format: str = "safetensors") -> None:
    """Saves the model as a checkpoint folder in one of the formats of `Case.saved`."""
    if file_format in ("safetensors", "sharded"):
        size = {"max_shard_size": "12KB"} if file_format == "sharded" else {}
        model.save_pretrained(folder, **size)
        return
    model.config.save_pretrained(folder)
    state = model.state_dict()
    modern = file_format != "legacy"
    if file_format != "sharded-bin":
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=modern)
        return
    names, weight_map = list(state), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({n: state[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def inputs(model: Any, seed: int = 1, n: int = 9, pad_left: bool = False) -> dict[str, np.ndarray]:
    """Draws two texts (or images), one of them padded, as the model's keyword arguments.

    Args:
        pad_left: Whether there is a third text, padded on the left.
    """
    rng = np.random.default_rng(seed)
    config = model.config
    if config.model_type == "whisper":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": rng.standard_normal(shape).astype(np.float32)}
    if hasattr(config, "image_size"):
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
    if pad_left:
        ids, mask = (np.concatenate([a, a[1:, ::-1]]) for a in (ids, mask))
    out = {"input_ids": ids, "attention_mask": mask}
    if has_decoder_part(model):
        ids, mask = text(n - 2, n - 4)
        out |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return out


def base(model: Any) -> Any:
    """The model without its head; of Whisper the encoder."""
    whisper = model.config.model_type == "whisper"
    return model.get_encoder() if whisper else model.base_model


def has_decoder_part(model: Any) -> bool:
    """Whether the model is an encoder with a decoder; T5's encoder is also saved alone."""
    return hasattr(base(model), "encoder") and hasattr(base(model), "decoder")


def run(model: Any, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hidden states [b, L+1, n, d] and attentions [b, L, h, n, n], by part for T5."""
    if getattr(model.config, "attn_type", "bi") == "uni" and len(arguments["input_ids"]) > 1:
        # The causal mask of XLNet in transformers admits one text at a time.
        outputs = [run(model, {k: v[i : i + 1] for k, v in arguments.items()}) for i in range(2)]
        return {name: np.concatenate([output[name] for output in outputs]) for name in outputs[0]}
    tensors = {k: torch.from_numpy(v) for k, v in arguments.items()}
    with torch.no_grad():
        out = base(model)(**tensors, output_hidden_states=True, output_attentions=True)

    def stack_layers(layers):
        return torch.stack(tuple(layers), dim=1).numpy()

    if not has_decoder_part(model):
        return {
            "hidden": stack_layers(out.hidden_states),
            "attention": stack_layers(out.attentions),
        }
    return {
        "hidden": stack_layers(out.encoder_hidden_states),
        "attention": stack_layers(out.encoder_attentions),
        "decoder_hidden": stack_layers(out.decoder_hidden_states),
        "decoder_attention": stack_layers(out.decoder_attentions),
        "cross_attention": stack_layers(out.cross_attentions),
    }
