"""How bfloat16 errors of states grow with depth, as docs/agree.md has them.

    OMP_NUM_THREADS=1 python -m tests_docs.agree_growth FOLDER pythia-410m

Of a checkpoint folder, or of random weights in a published shape (with a vocabulary of 2,048): the
relative error ‖y − x‖/‖x‖ over all tokens of one text of 64 tokens, alone against in a batch of 8,
both in bfloat16, and in bfloat16 against float32; and the same of the logits.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from rank_collapse.agree.recording import open_recording
from rank_collapse.torch import record

COMMON = {"vocab_size": 2048, "num_hidden_layers": 24}
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")
# {name: (class of its config, values of SIZES, what else it has)}
SHAPES = {
    "pythia-410m": (
        transformers.GPTNeoXConfig,
        (1024, 16, 4096),
        {"rotary_pct": 0.25, "use_parallel_residual": True},
    ),
    "qwen2.5-0.5b": (
        transformers.Qwen2Config,
        (896, 14, 4864),
        {"num_key_value_heads": 2, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
}


def load_model(name, dtype):
    """Return a checkpoint, or a model of a published shape, in a dtype."""
    torch.manual_seed(0)
    if name in SHAPES:
        make_config, sizes, others = SHAPES[name]
        config = make_config(**COMMON, **dict(zip(SIZES, sizes, strict=True)), **others)
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()


def record_states(model, ids, path):
    """Return the first example's states [L + 1, n, d] and logits [n, vocabulary]."""
    with torch.no_grad(), record(model, path):
        model(ids)
    recording = open_recording(path)
    layers = list(recording.read_layers())
    states = [layers[0].before[0], *(layer.after[0] for layer in layers)]
    return states, recording.read_logits()[0]


def describe(first, second):
    """Return the errors of a pair as a line."""
    pairs = list(zip(first[0], second[0], strict=True))
    errors = [np.linalg.norm(y - x) / np.linalg.norm(x) for x, y in pairs]
    tokens = [
        np.median(np.linalg.norm(y - x, axis=-1) / np.linalg.norm(x, axis=-1)) for x, y in pairs
    ]
    depth, logits = len(errors) - 1, [pair[1] for pair in (first, second)]
    quarter = errors[depth // 4 : 3 * depth // 4 + 1]
    places = {"after layer 0": 1, "in the middle": depth // 2, "at the end": depth}
    parts = [f"{k} {errors[i]:.4f} (median token {tokens[i]:.4f})" for k, i in places.items()]
    parts += [f"largest {max(errors):.4f}", f"median of the middle half {np.median(quarter):.4f}"]
    logit_error = np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0])
    return ", ".join([*parts, f"logits {logit_error:.4f}"])


def main(names):
    """Prints the errors of each model."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in names:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "a.safetensors"
            model = load_model(name, torch.bfloat16)
            ids = torch.as_tensor(
                np.random.default_rng(0).integers(model.config.vocab_size, size=(8, 64))
            )
            alone = record_states(model, ids[:1], path)
            in_batch = record_states(model, ids, path)
            exact = record_states(model.float(), ids[:1], path)
        print(f"{Path(name).name}, batch of 1 and of 8: {describe(alone, in_batch)}")
        print(f"{Path(name).name}, bfloat16 and float32: {describe(exact, alone)}")
        print(f"{time.process_time() - start:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
