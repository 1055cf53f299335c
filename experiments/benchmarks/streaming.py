"""Benchmark of checkpoints measured layer by layer: time and peak memory of one process.

    python -m experiments.benchmark --benchmark=streaming --stream_size=1.1b
    python -m experiments.benchmark --benchmark=streaming --stream_size=7b --stream_texts=4

Residuals of all variants and the exact sums of all paths by length, the checkpoint's making left
out. Compilation and Python's start are in the time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import children, memory
from experiments.benchmarks.random_llama import PUBLISHED, make
from experiments.benchmarks.timing import Report, Timing
from experiments.shell.progress import Progress

# seconds and gigabytes that were asked for, of (size, texts) with 64 tokens on two cores
LIMITS = {("1.1b", 1): (60.0, 1.5), ("7b", 4): (480.0, 4.0)}


def operations(size: str, texts: int, tokens: int) -> tuple[float, float]:
    """Floating-point operations of (forward passes of the variants, path sums): their floor.

    Five readings of the variants: all five pass attention, three the MLP. Layer l = 1 .. L moves l
    lengths through values and output projection, and l + 1 through two maps of the MLP; the sums of
    different lengths are different vectors, and no exact scheme with fewer products is known.
    Attention itself and norms are left out: below 1 % at 64 tokens.
    """
    depth, d, f, h, groups, _ = PUBLISHED[size]
    rows = texts * tokens
    projections = 4 * d * d + 4 * d * d * groups / h  # queries and output; keys and values
    forward = depth * rows * (5 * projections + 3 * 6 * d * f)
    attention, mlp = 4 * d * d, 4 * d * f  # every head has values of its own in a path
    lengths = rows * sum(l * attention + (l + 1) * mlp for l in range(1, depth + 1))
    return forward, lengths


def streaming(options: Any, limit: float | None = None) -> Report:
    """One checkpoint of random weights, measured by a process of its own, killed after `limit`."""
    size, texts, tokens = options.stream_size, options.stream_texts, options.stream_tokens
    folder = Path(options.stream_folder) / f"llama-{size}"
    make(folder, size)
    begin = time.perf_counter()
    found = children.found_by(__name__, str(folder), str(texts), str(tokens), limit=limit)
    seconds = time.perf_counter() - begin
    limits = LIMITS.get((size, texts), (None, None))
    forward, lengths = operations(size, texts, tokens)
    figures = {
        "seconds, start and compilation included": (seconds, limits[0]),
        "GB at the process's peak": (found["peak"] / 1e9, limits[1]),
        "GB of arrays on devices, or the same": (found["device"] / 1e9, None),
        "GB before the first layer": (found["before"] / 1e9, None),
        "GB of the checkpoint": (found["bytes"] / 1e9, None),
        "error of the sum over all lengths": (found["error"], 1e-5),
        "TFLOP of the forward passes": (forward / 1e12, None),
        "TFLOP of the path sums": (lengths / 1e12, None),
        "GFLOP/s over everything": ((forward + lengths) / seconds / 1e9, None),
    }
    timing = Timing(f"llama {size}", 0.0, [seconds])
    return Report([timing], timing.name, figures)


def measure(folder: str, texts: int, tokens: int) -> dict[str, float]:
    """What the benchmark's process does."""
    import jax

    from rank_collapse import pretrained
    from rank_collapse.measures.profiles import ProfilePass
    from rank_collapse.network.surgery import variants_of
    from rank_collapse.paths.contributions import LengthPass
    from rank_collapse.paths.effects import sizes_of

    source = pretrained.open_checkpoint(folder)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, source.config.embedding.vocab_size, (texts, tokens))
    profile = ("profile", ProfilePass(("residual_ratio", "token_cosine")))
    groups = {
        f"{variant}/{reading}": pretrained.Group(
            (profile,), pretrained.AblationSpec(variant, reading)
        )
        for variant, reading in variants_of("llama")
        if variant != "Transformer"
    }
    groups["whole"] = pretrained.Group((profile, ("lengths", LengthPass(source.biased))))
    before = memory.peak()
    with Progress(source.config.depth, "layers") as progress:

        def done(state):
            progress.reach(state.layers, GB=memory.peak() / memory.GB)

        found = pretrained.stream(source, {"x": ids}, groups, done=done)
    error = jax.vmap(sizes_of)(found["whole"]["lengths"])["error"].max()
    return {
        "peak": memory.peak(),
        "device": memory.peak(jax.local_devices()),
        "before": before,
        "bytes": source.weights.checkpoint.num_bytes(),
        "error": float(error),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
