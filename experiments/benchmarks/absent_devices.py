"""Programs compiled for accelerators that are not there: `--compile_for=h100,v5e`.

    python -m experiments.benchmark --compile_for=v5e --json=results/benchmark/compiled.json

XLA's compilers for GPUs and TPUs need the plugin (`pip install "jax[cuda13]"`, `"jax[tpu]"`) and a
description of the device, not the device. Operations are counted, memory is the compiled program's;
seconds are those of the published rates: computed, not measured.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from experiments.benchmarks import accelerator, children, memory, timing, training
from experiments.benchmarks.counting import DEVICES, product_flops, seeds_that_fit
from experiments.benchmarks.entry_points import entry_points
from experiments.shell.options import check_names
from rank_collapse.runs import files, seeds
from rank_collapse.training.ensemble import Ensemble
from rank_collapse.training.training import Hyper, num_batches

# The module and the extra of `pip install "jax[...]"` that compile for a device.
PLUGINS = {"h100": ("jax_cuda13_plugin", "cuda13"), "v5e": ("libtpu", "tpu")}
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
runtime_version { major: 13 } platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Sizes of the entry points, and of training: cases, seeds and further arguments.
PUBLISHED = {"depth": 12, "num_heads": 12, "d_model": 768, "num_tokens": 128, "d_ff": 3072}
SEEDS = (1, 64, 1024)
HEADS = ("GFLOP", "GB moved", "GB at the peak", "compile s", "ms, computed", "seeds that fit")


def compile_for(options: Any) -> int:
    """Prints the table of every device asked for, and writes --json after each; exit code 0.

    Raises:
        ValueError: A device that is not known, or whose compiler is not installed.
    """
    check_names(options, "compile_for", PLUGINS)
    for name in options.compile_for:
        module, extra = PLUGINS[name]
        if importlib.util.find_spec(module) is None:
            package = f"jax[{extra}]=={jax.__version__}"
            raise ValueError(f'--compile_for={name} needs its compiler: pip install "{package}"')
    found = {}
    for name in options.compile_for:
        try:
            found[name] = children.found_by(__name__, name, options.suite_size, **environment(name))
        except subprocess.SubprocessError as error:
            raise ValueError(f"--compile_for={name}: {error}") from error
        if options.json:
            files.write_atomically(options.json, json.dumps(found, indent=1).encode())
        print(f"\n{name}, {options.suite_size} size\n{table(found[name])}")
    return 0


def environment(name: str) -> dict[str, str]:
    """Variables of a process that compiles for a device: no device is opened, libraries found."""
    found = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    spec = importlib.util.find_spec("nvidia") if name == "h100" else None
    if spec is not None:
        roots = map(Path, spec.submodule_search_locations or ())
        folders = [str(path) for root in roots for path in root.glob("*/lib") if path.is_dir()]
        found["LD_LIBRARY_PATH"] = ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])
    return found


def table(rows: dict[str, dict[str, float]]) -> str:
    """A table in Markdown: a row a program."""
    lines = [[name, *(row.get(head) for head in HEADS)] for name, row in rows.items()]
    return timing.table(("program", *HEADS), lines)


def topology(name: str) -> Any:
    """The description of one device, or of the smallest slice there is."""
    from jax.experimental import topologies

    if name == "v5e":
        return topologies.get_topology_desc("v5e:2x2", platform="tpu")
    return topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")


def rows(name: str, size: str) -> Iterator[tuple[str, dict[str, float]]]:
    """(program, its figures) of all entry points for one seed, and of steps of training."""
    device, mesh = DEVICES[name], seeds.seed_mesh(topology(name).devices[:1])
    whole = NamedSharding(mesh, PartitionSpec())
    for what, point in entry_points(
        **PUBLISHED if size == "full" else accelerator.SIZES[size]["network"]
    ).items():
        shapes = jax.tree.map(lambda a: a.update(sharding=whole), point.shapes)
        yield what, figures(jax.jit(point.fn).trace(*shapes), device)
    for case in training.CASES if size == "full" else ("sort",):
        peaks = {}
        for count in SEEDS:
            traced, steps = epoch_of(case, count, mesh, size)
            row = figures(traced, device, count, steps)
            if row:
                peaks[count] = row["GB at the peak"]
                if len(peaks) > 1:
                    row["seeds that fit"] = seeds_that_fit(peaks, device.memory / 1e9)
            yield f"train_{case}, {count} seeds, each step of one", row


def epoch_of(case: str, count: int, mesh: Any, size: str) -> tuple[Any, int]:
    """(one epoch of training `count` seeds together, traced; the steps it has)."""
    recipe, make_data, _ = training.setup_of(case, () if size == "full" else training.TINY)
    ensemble = Ensemble(recipe, make_data, mesh=mesh, epochs_per_chunk=1)
    laid = seeds.seed_sharding(mesh)
    values = Hyper(learning_rate=1e-3, dropout=0.1)
    one = (jax.random.key(0), jax.tree.map(jnp.float32, values))
    drawn = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype, sharding=laid), one
    )
    state, data = jax.eval_shape(ensemble.begin, *drawn, None)
    state, data = jax.tree.map(lambda a: a.update(sharding=laid), (state, data))
    epoch = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    traced = ensemble.chunk.trace(state, data, drawn[1], epoch)
    examples = jax.tree.leaves(data["train"])[0].shape[1]
    return traced, num_batches(examples, recipe.batch_size)


def figures(traced: Any, device: Any, count: int = 1, steps: int = 1) -> dict[str, float]:
    """Of one program, compiled; of a step of one of `count` seeds, but for memory and compiling.

    Moved are at least its arguments and results once, what it keeps meanwhile twice; caches may
    hold the little that is used again and again. Computed is the longer of products and memory
    traffic. Of a program that the compiler refuses nothing, and its reason on stderr.
    """
    begun = time.perf_counter()
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        print(str(error).partition("\n")[0], file=sys.stderr, flush=True)
        return {}
    seconds = time.perf_counter() - begun
    sizes = compiled.memory_analysis()
    moved = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    moved = (moved + 2 * sizes.temp_size_in_bytes) / count
    flops = product_flops(traced.jaxpr.jaxpr) / steps / count
    computed = max(flops / device.products, moved / device.bandwidth)
    peak = memory.program_bytes(compiled)
    values = flops / 1e9, moved / 1e9, peak / 1e9, seconds, 1e3 * computed
    return dict(zip(HEADS, values, strict=False))


def main() -> None:
    """What a child does: every row as it comes on stderr, all of them as JSON on stdout."""
    found = {}
    with jax.default_matmul_precision("highest"):
        for name, row in rows(*sys.argv[1:]):
            found[name] = row
            print(name, row, file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
