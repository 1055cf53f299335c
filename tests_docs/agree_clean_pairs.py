"""Pairs of runs that differ by rounding alone, of small random models of transformers.

    OMP_NUM_THREADS=1 python -m tests_docs.agree_clean_pairs 16

So many networks of random sizes and weights (Llama, Qwen2, GPT-2, GPT-NeoX) for each kind of pair:
it prints how many pairs are called different, from branches, from states alone, and by a replay.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from rank_collapse.agree.comparison import compare_recordings
from rank_collapse.agree.recording import open_recording, write_recording
from rank_collapse.agree.replay import Replay
from rank_collapse.command.recorded import NOISE, Form, Tokens, record_folder
from rank_collapse.torch import record

KINDS = (
    "bfloat16",
    "float16",
    "eager and SDPA, float32",
    "eager and SDPA, bfloat16",
    "one thread and two",
    "torch and JAX",
    "batch of 1 and of 8, bfloat16",
    "prefill and steps, float32",
    "prefill and steps, bfloat16",
)


def draw_model(seed):
    """Return a random model in float32 with eager attention, and token ids [8, n]."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    depth, width = int(rng.integers(3, 9)), int(rng.choice([32, 64, 96]))
    sizes = {
        "vocab_size": 101,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
        "intermediate_size": 3 * width,
        "initializer_range": float(rng.choice([0.02, 0.06, 0.15])),
        "max_position_embeddings": 64,
    }
    grouped = {"num_key_value_heads": int(rng.choice([1, 2, 4]))}
    config = (
        lambda: transformers.LlamaConfig(**sizes, **grouped),
        lambda: transformers.Qwen2Config(**sizes, **grouped),
        lambda: transformers.GPT2Config(**sizes),
        lambda: transformers.GPTNeoXConfig(**sizes),
    )[int(rng.integers(4))]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval(), torch.as_tensor(rng.integers(101, size=(8, int(rng.choice([8, 24])))))


def record_run(model, ids, path, *, one_by_one=False, **options):
    """Record one run; with one_by_one in steps with a cache of keys and values."""
    with torch.no_grad(), record(model, path, **options):
        if not one_by_one:
            model(ids)
            return
        cache = model(ids[:, :2], use_cache=True).past_key_values
        for token in range(2, ids.shape[1]):
            cache = model(ids[:, token : token + 1], past_key_values=cache).past_key_values


def take_example(path, index, out):
    """Write one example of a recording."""
    layers = list(open_recording(path).read_layers())
    arrays = {"residual": [layers[0].before, *(layer.after for layer in layers)]}
    for name in layers[0].branches:
        arrays[name] = [layer.branches[name] for layer in layers]
    arrays = {k: np.stack(a)[:, index : index + 1].astype(np.float32) for k, a in arrays.items()}
    write_recording(out, arrays)


def keep_states(path):
    """Write the states of a recording alone; returns them opened."""
    layers = list(open_recording(path).read_layers())
    states = np.stack([layers[0].before, *(layer.after for layer in layers)]).astype(np.float32)
    write_recording(path.with_suffix(".npz"), {"residual": states})
    return open_recording(path.with_suffix(".npz"))


def record_pair(kind, seed, folder):
    """Record both runs; returns (paths, model of the first run, its ids), None without a replay."""
    model, ids = draw_model(seed)
    first, second = folder / "a.safetensors", folder / "b.safetensors"
    if kind == "torch and JAX":
        model.save_pretrained(folder / "model")
        tokens = Tokens(ids.numpy(), np.ones(ids.shape, bool))
        for path, backend in ((first, "torch"), (second, "jax")):
            record_folder(folder / "model", path, tokens, Form("float32", "eager", backend))
        return (first, second), model, ids
    if "bfloat16" in kind and kind != "bfloat16":
        model = model.bfloat16()
    if kind.startswith("batch"):
        record_run(model, ids, folder / "all.safetensors")
        take_example(folder / "all.safetensors", 0, second)
        record_run(model, ids[:1], first)
        return (first, second), model, ids[:1]
    record_run(model, ids, first)
    if kind in ("bfloat16", "float16"):
        coarse, _ = draw_model(seed)
        record_run(coarse.to(getattr(torch, kind)), ids, second)
    elif kind.startswith("eager"):
        model.set_attn_implementation("sdpa")
        record_run(model, ids, second)
        model.set_attn_implementation("eager")
    elif kind.startswith("one thread"):
        torch.set_num_threads(2)
        record_run(model, ids, second)
        torch.set_num_threads(1)
    else:
        record_run(model, ids, second, one_by_one=True)
    return (first, second), model, ids


def replay_first(model, ids, second, folder):
    """Run the first model on the inputs of the second run, and probes in float32."""
    record_run(model, ids, folder / "replay.safetensors", inputs=second)
    model = model.float()
    record_run(model, ids, folder / "still.safetensors", inputs=second)
    for k in range(2):
        path = folder / f"noisy{k}.safetensors"
        record_run(model, ids, path, inputs=second, noise=NOISE, seed=k)
    names = ("replay", "still", "noisy0", "noisy1")
    replay, *probes = (open_recording(folder / f"{name}.safetensors") for name in names)
    return Replay(0, replay, tuple(probes))


def main(count):
    """Prints the table."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    start = time.process_time()
    columns = "branches | states alone | replay"
    print(f"| pair | different, {columns} | largest excess, {columns} |")
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        alarms, largest = np.zeros(3, int), np.zeros(3)
        for seed in range(300_000, 300_000 + count):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                paths, model, ids = record_pair(kind, seed, folder)
                pair = [open_recording(path) for path in paths]
                replay = replay_first(model, ids, paths[1], folder)
                answers = (
                    compare_recordings(*pair),
                    compare_recordings(*map(keep_states, paths)),
                    compare_recordings(*pair, replay),
                )
                alarms += [answer.agree is False for answer in answers]
                most = [max(r.excess for r in answer.rows if r.judged) for answer in answers]
                largest = np.maximum(largest, most)
                for answer in answers:
                    if answer.agree is not True:
                        print(f"  {kind}, seed {seed}: {answer.sentence}", file=sys.stderr)
        sizes = " | ".join(f"{size:.2g}" for size in largest)
        print(f"| {kind} | {' | '.join(map(str, alarms))} | {sizes} |", flush=True)
    print(f"{time.process_time() - start:.0f} s of CPU")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
