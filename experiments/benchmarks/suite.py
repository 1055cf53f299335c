"""The first hour on a device: `--suite=accelerator`, every benchmark that needs one.

    python -m experiments.benchmark --suite=accelerator
    python -m experiments.benchmark --suite=accelerator --suite_size=toy       (on a CPU)

Each step is a process of its own, so that options of the compiler can differ, memory is counted
from nothing and a crash costs one step. What is done is in the JSON file, written after each step;
the same command again computes what is missing.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from experiments.benchmarks import children, streaming, timing
from rank_collapse.runs import files

# Name: (benchmark, options of XLA).
STEPS = {
    "accuracy": ("accuracy", ""),
    "precision": ("precision", ""),
    "seeds": ("many_seeds", ""),
    "memory": ("peak_memory", ""),
    "sharding": ("sharding", ""),
    "options: none": ("small_products", ""),
    "options: no Triton products": ("small_products", "--xla_gpu_enable_triton_gemm=false"),
    "options: no command buffers": ("small_products", "--xla_gpu_enable_command_buffer="),
    "options: command buffers of loops": (
        "small_products",
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE",
    ),
    "options: autotuning level 0": ("small_products", "--xla_gpu_autotune_level=0"),
    "options: autotuning level 2": ("small_products", "--xla_gpu_autotune_level=2"),
    "streaming": ("streaming", ""),
}
LLAMA = {"full": "7b", "toy": "tiny"}


def run_suite(options: Any) -> int:
    """Runs what the JSON file does not have yet; 1 where something is missing at the end.

    Raises:
        RunError: A file that cannot be written.
        ValueError: One that is of another size.
    """
    path = Path(options.json or "results/benchmark/accelerator.json")
    found = {"size": options.suite_size, "steps": {}}
    if path.exists() and not options.overwrite:
        found = json.loads(path.read_text("utf-8"))
        if found.get("size") != options.suite_size:
            raise ValueError(f"{path} is not of --suite_size={options.suite_size}; --overwrite it")

    def keep():
        files.write_atomically(path, json.dumps(found, indent=1).encode())
        files.write_atomically(path.with_suffix(".md"), table(found).encode())

    end = time.monotonic() + options.suite_seconds
    for name, (benchmark, xla) in STEPS.items():
        if "found" in found["steps"].get(name, {}):
            print(f"{name}: done before")
            continue
        left = end - time.monotonic()
        if left <= 0:
            break
        print(f"{name}: begins with {left:.0f} s left", flush=True)
        found["steps"][name] = step(benchmark, xla, options, left)
        keep()
    keep()  # a table that was deleted too
    print(table(found))
    missing = [name for name in STEPS if "found" not in found["steps"].get(name, {})]
    if missing:
        print(f"missing: {', '.join(missing)}; the same command computes them")
    return 1 if missing else 0


def step(benchmark: str, xla: str, options: Any, limit: float) -> dict[str, Any]:
    """One benchmark in a process of its own: what it found, or why it failed."""
    begun, machine = time.monotonic(), {}
    try:
        if benchmark == "streaming":  # which starts a process, that of the devices
            options.stream_size = LLAMA[options.suite_size]
            own = timing.as_json(streaming.streaming(options, limit))
        else:
            variables = {"XLA_FLAGS": xla} if xla else {}
            machine = children.found_by(
                "experiments.benchmark",
                f"--benchmark={benchmark}",
                "--json=-",
                f"--suite_size={options.suite_size}",
                f"--rounds={options.rounds}",
                limit=limit,
                **variables,
            )
            own = machine.pop("benchmarks")[benchmark]
    except subprocess.SubprocessError as error:
        return {"failed": str(error), "seconds": time.monotonic() - begun}
    seconds = time.monotonic() - begun
    return {"found": own, "seconds": seconds, "machine": machine, "xla": xla}


def table(found: dict[str, Any]) -> str:
    """All figures as a table in Markdown: a row a figure, a column a step of the same benchmark."""
    done = {n: s["found"]["figures"] for n, s in found["steps"].items() if "found" in s}
    devices = {s["machine"]["device"] for s in found["steps"].values() if s.get("machine")}
    parts = [f"{', '.join(sorted(devices))}; {found['size']} size"]
    for benchmark in dict.fromkeys(STEPS[name][0] for name in done):
        columns = {n: figures for n, figures in done.items() if STEPS[n][0] == benchmark}
        heads = [benchmark, *(name.removeprefix("options: ") for name in columns)]
        empty = {"value": None}
        rows = [
            [figure, *(own.get(figure, empty)["value"] for own in columns.values())]
            for figure in next(iter(columns.values()))
        ]
        parts.append(timing.table(heads, rows))
    return "\n\n".join(parts) + "\n"
