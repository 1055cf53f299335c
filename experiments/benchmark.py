"""Benchmarks: time, compilation and memory of the computations that have a target.

    python -m experiments.benchmark                              (all of them)
    python -m experiments.benchmark --benchmark=exact_paths,recomputed_paths
    python -m experiments.benchmark --suite=accelerator          (the first hour on a device)
    python -m experiments.benchmark --compile_for=h100,v5e       (devices that are not there)

Each benchmark times its cases in turn, round after round, so that other work on the machine slows
all of them equally. Ratios to the baseline are from the same rounds. Compilation is timed
separately; the time of a case is that of its fastest round.
"""

import json
import os
import time
from functools import partial

import jax
from absl import flags

from experiments.benchmarks import (
    absent_devices,
    accelerator,
    budgets,
    monitoring,
    paths,
    profiles,
    streaming,
    suite,
    training,
)
from experiments.benchmarks.counting import DEVICES
from experiments.benchmarks.random_llama import SIZES
from experiments.benchmarks.timing import as_json, show
from experiments.shell import cli
from experiments.shell.options import check_names
from rank_collapse.runs import files

# Each is a function of the flags that gives a `timing.Report`.
BENCHMARKS = {
    "collapse_sweep": profiles.collapse_sweep,
    "log_profile": profiles.log_profile,
    "exact_paths": paths.exact_paths,
    "head_contributions": paths.head_contributions,
    "recomputed_paths": paths.recomputed_paths,
    "streaming": streaming.streaming,
    "monitor": monitoring.monitor,
    "budgets": budgets.budgets,
} | {f"train_{name}": partial(training.time_training, name) for name in training.CASES}

# Asked for by name: the one that writes gigabytes, that of a cluster, that of all experiments, and
# those of a device.
USUAL = [name for name in BENCHMARKS if name not in ("streaming", "budgets")]
BENCHMARKS |= accelerator.BENCHMARKS
FLAGS = cli.bare_flags()
define = cli.definer(FLAGS)
define("boolean", "overwrite", False, "Begin --suite again.")
define("integer", "num_devices", 0, "Devices (0: all; on a CPU one per core).", lower_bound=0)
define("list", "benchmark", USUAL, f"Benchmarks to run, out of {', '.join(BENCHMARKS)}.")
define(
    "enum",
    "baseline",
    "none",
    "Also time training in PyTorch: a plain loop, or also compiled and vmapped.",
    training.BASELINES,
)
define("string", "json", None, "File to which the numbers are also written; -: printed at the end.")
define("integer", "rounds", 5, "Timed rounds.", lower_bound=1)
define("enum", "stream_size", "1.1b", "Size of the random Llama of `streaming`.", tuple(SIZES))
define("integer", "stream_texts", 1, "Number of its texts.", lower_bound=1)
define("integer", "stream_tokens", 64, "Tokens of each text.", lower_bound=2)
define("string", "stream_folder", "results/benchmark", "Folder of that model, which is kept.")
define(
    "enum", "suite", None, "All measurements that need a device, in one table.", ("accelerator",)
)
define(
    "enum",
    "suite_size",
    "full",
    "Sizes of --suite, its parts and --compile_for; toy: to see that they work.",
    tuple(accelerator.SIZES),
)
define(
    "integer",
    "suite_seconds",
    540,
    "Seconds after which the suite stops; the same command continues it.",
    lower_bound=1,
)
define("list", "compile_for", [], f"Devices, which may be absent: {', '.join(DEVICES)}.")


def main(options: flags.FlagValues) -> int:
    if options.suite:
        return suite.run_suite(options)
    if options.compile_for:
        return absent_devices.compile_for(options)
    check_names(options, "benchmark", BENCHMARKS)
    device = jax.devices()[0]
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{device.platform} {device.device_kind} x {jax.device_count()}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "jax": jax.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    failures, aux = [], {}

    def keep():
        text = json.dumps(machine | {"benchmarks": aux}, indent=1)
        if options.json and options.json != "-":
            files.write_atomically(options.json, text.encode())

    keep()  # a file that cannot be written is refused before anything is timed
    for name in options.benchmark:
        found = BENCHMARKS[name](options)
        print(f"\n{name}")
        failures += [f"{name}: {text}" for text in show(found)]
        aux[name] = as_json(found)
        keep()
    for failure in failures:
        print(f"over the limit: {failure}")
    if options.json == "-":
        print(json.dumps(machine | {"benchmarks": aux}))
    return 1 if failures else 0


if __name__ == "__main__":
    cli.run(main, FLAGS)
