"""Pairs of runs of one checkpoint that differ in their arithmetic, as docs/agree.md has them.

    OMP_NUM_THREADS=1 python -m tests_docs.agree_trained FOLDER
    python -m tests_docs.agree_trained FOLDER --write=Q4_FOLDER

Each pair takes the shipped texts of `rank-collapse agree`, and a replay where one can be made. The
second command only writes the checkpoint of 4 bits: the matrices of the layers in blocks of 32
numbers as GGUF's Q4_0 has them, a float16 scale and 16 levels for each block.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from rank_collapse.agree.comparison import compare_recordings
from rank_collapse.agree.recording import open_recording
from rank_collapse.agree.replay import Replay
from rank_collapse.command import agree
from rank_collapse.command.recorded import (
    NOISE,
    Form,
    Tokens,
    read_tokens,
    record_folder,
    record_replay,
)
from rank_collapse.torch import record

BLOCK = 32
FLOAT32, BFLOAT16 = (Form(dtype, "eager", "torch") for dtype in ("float32", "bfloat16"))
# {pair: (form of the first run, of the second)}; those of steps are recorded by `record_steps`.
FORMS = {
    "float32 and bfloat16": (FLOAT32, BFLOAT16),
    "float32 and float16": (FLOAT32, FLOAT32._replace(dtype="float16")),
    "eager and SDPA, float32": (FLOAT32, FLOAT32._replace(attention="sdpa")),
    "eager and SDPA, bfloat16": (BFLOAT16, BFLOAT16._replace(attention="sdpa")),
    "torch and JAX": (FLOAT32, FLOAT32._replace(backend="jax")),
    "float32 and 4-bit weights": (FLOAT32, FLOAT32),
}
STEPS = {"prefill and steps, float32": FLOAT32, "prefill and steps, bfloat16": BFLOAT16}


def quantize_blocks(weights: np.ndarray) -> np.ndarray:
    """Round weights [..., 32 m] to the nearest of 16 levels of each block, as GGUF's Q4_0 does.

    The number of the largest modulus becomes −8 times the scale, which is a float16.
    """
    blocks = weights.reshape(-1, BLOCK).astype(np.float32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / -8
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    levels = np.clip(np.floor(blocks * inverse + 8.5), 0, 15) - 8
    return (levels * scale.astype(np.float16).astype(np.float32)).reshape(weights.shape)


def write_quantized(folder: Path, out: Path) -> None:
    """Write a checkpoint whose matrices of layers have 4 bits."""
    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        arrays = load_file(path)
        for name, array in arrays.items():
            if ".layers." in name and array.ndim == 2 and array.shape[1] % BLOCK == 0:
                arrays[name] = quantize_blocks(array)
        save_file(arrays, path, {"format": "pt"})


def load_model(folder, form):
    """Return a model of transformers."""
    options = {"dtype": getattr(torch, form.dtype), "attn_implementation": form.attention}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def record_run(model, ids, path, *, num_first, **options):
    """Record one run: the first tokens at once, the others one by one with a cache."""
    with torch.no_grad(), record(model, path, **options):
        cache = model(ids[:, :num_first], use_cache=True).past_key_values
        for token in range(num_first, ids.shape[1]):
            cache = model(ids[:, token : token + 1], past_key_values=cache).past_key_values


def record_steps(folder, tokens, form, scratch):
    """Record a whole text, and the same in steps; returns both and the replay of the first."""
    ids = torch.as_tensor(tokens.ids, dtype=torch.long)
    paths = [scratch / f"{name}.safetensors" for name in ("a", "b", "replay", "still", *"01")]
    model, n = load_model(folder, form), ids.shape[1]
    record_run(model, ids, paths[0], num_first=n)
    record_run(model, ids, paths[1], num_first=n // 4)
    record_run(model, ids, paths[2], num_first=n, inputs=paths[1])
    model = model.float()
    record_run(model, ids, paths[3], num_first=n, inputs=paths[1])
    for seed in range(2):
        options = {"inputs": paths[1], "noise": NOISE, "seed": seed}
        record_run(model, ids, paths[4 + seed], num_first=n, **options)
    first, second, replay, *probes = map(open_recording, paths)
    return (first, second), Replay(0, replay, tuple(probes))


def record_forms(folders, tokens, forms, scratch):
    """Record a checkpoint in two forms; returns both and the replay."""
    paths = [scratch / f"{name}.safetensors" for name in "ab"]
    for folder, path, form in zip(folders, paths, forms, strict=True):
        record_folder(folder, path, tokens, form)
    replay = record_replay(folders, paths, tokens, forms)
    return tuple(map(open_recording, paths)), replay


def describe(name, answer):
    """Return a row of the table: the excess of the worst sublayer, and what is added."""
    row = max((r for r in answer.rows if r.judged), key=lambda row: row.excess)
    added = [np.median([r.added for r in answer.rows if r.part == p]) for p in ("attention", "mlp")]
    differ = answer.outputs.get("share of next tokens that differ")
    shown = "" if differ is None else f"{differ:.1%}"  # the headless model has no logits
    place = f"layer {row.layer}, {row.part}"
    sizes = " | ".join(f"{size:.2g}" for size in added)
    verdict = {True: "yes", False: "no", None: "cannot tell"}[answer.agree]
    return f"| {name} | {verdict} | {row.excess:.2g} ({place}) | {sizes} | {shown} |"


def read_shipped(folder):
    """Return the token ids that `rank-collapse agree` takes by default."""
    parser = argparse.ArgumentParser()
    agree.add_arguments(parser)
    return read_tokens(parser.parse_args([str(folder), str(folder)]), folder)


def main(folder: Path, wanted: list[str]) -> None:
    """Prints the table."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    start, tokens = time.process_time(), read_shipped(folder)
    lengths = tokens.mask.sum(axis=1)
    # Steps join calls of one length: the longest text alone.
    longest = int(lengths.argmax())
    alone = Tokens(*(a[longest : longest + 1, : lengths[longest]] for a in tokens))
    print("| runs | agree | largest excess | attention adds | MLP adds | next tokens differ |")
    print("|---|---|---|---|---|---|")
    for name in wanted or [*FORMS, *STEPS]:
        with tempfile.TemporaryDirectory() as scratch:
            folders = [folder, folder]
            if "4-bit" in name:
                folders[1] = Path(scratch) / "quantized"
                write_quantized(folder, folders[1])
            if name in FORMS:
                pair, replay = record_forms(folders, tokens, FORMS[name], Path(scratch))
            else:
                pair, replay = record_steps(folder, alone, STEPS[name], Path(scratch))
            answer = compare_recordings(*pair, replay)
            print(describe(name, answer), flush=True)
            print(f"  {name}: {answer.sentence}", file=sys.stderr)
    print(f"{time.process_time() - start:.0f} s of CPU")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("pairs", nargs="*", help="names of rows (default: all)")
    arguments.add_argument("--write", type=Path, help="write the checkpoint of 4 bits, and end")
    parsed = arguments.parse_args()
    if parsed.write:
        write_quantized(parsed.folder, parsed.write)
    else:
        main(parsed.folder, parsed.pairs)
