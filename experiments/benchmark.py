"""Benchmarks: time, compilation and memory of the computations that have a target.

    python -m experiments.benchmark                              (those of less than a minute)
    python -m experiments.benchmark --benchmark=exact_paths,recomputed_paths
    python -m experiments.benchmark --baseline=torch             (the same, training with PyTorch)
    python -m experiments.benchmark --benchmark=exact_profile    (by name, also one of minutes)
    python -m experiments.benchmark --benchmark=train_sort --num_seeds=256

Each benchmark times its cases in turn, round after round, so that other work on the machine slows
all of them equally. Ratios to the baseline are from the same rounds. Compilation is timed
separately; the time of a case is that of its fastest round. Each benchmark first prints its name
and the time that it takes on two idle cores, and then every first call and round as it ends.
"""

import os
import time
from functools import partial

import jax
from absl import flags

from experiments.benchmarks import monitoring, paths, profiles, seeds, training
from experiments.benchmarks.timing import print_report
from experiments.lab import check_names, cli

# Each is a function of the flags that gives a `timing.Report`.
BENCHMARKS = {
    "collapse_sweep": profiles.time_collapse_sweep,
    "log_profile": profiles.time_log_profile,
    "exact_profile": profiles.time_exact_profile,
    "exact_paths": paths.time_exact_paths,
    "head_contributions": paths.time_head_contributions,
    "recomputed_paths": paths.time_recomputed_paths,
    "monitor": monitoring.time_monitor,
    "seeds": seeds.time_seeds,
} | {f"train_{name}": partial(training.time_training, name) for name in training.CASES}

# Seconds of CPU that each takes with five rounds; beyond `LONG` it runs only where it is named.
CPU_SECONDS = {
    "collapse_sweep": 25,
    "log_profile": 7,
    "exact_profile": 600,
    "exact_paths": 60,
    "head_contributions": 90,
    "recomputed_paths": 5,
    "monitor": 120,
    "seeds": 600,
    "train_sort": 20,
    "train_convex_hull": 40,
    "train_memorization": 60,
    "train_translation": 60,
}
LONG = 90
USUAL = [name for name in BENCHMARKS if CPU_SECONDS[name] <= LONG]

FLAGS = cli.bare_flags()
FLAGS.define("integer", "num_devices", 0, "Devices (0: all; on a CPU one per core).", lower_bound=0)
FLAGS.define(
    "list",
    "benchmark",
    USUAL,
    f"Benchmarks, out of {', '.join(BENCHMARKS)}. By default those that take less than "
    f"{LONG} s of CPU: not {', '.join(n for n in BENCHMARKS if n not in USUAL)}.",
)
FLAGS.define("enum", "baseline", "none", "Also time training in PyTorch.", training.BASELINES)
FLAGS.define(
    "integer",
    "num_seeds",
    0,
    "Seeds at a time, of training and of collapse_sweep (0: as many as on the page).",
    lower_bound=0,
)
FLAGS.define("integer", "rounds", 5, "Timed rounds.", lower_bound=1)


def main(options: flags.FlagValues) -> int:
    """Runs the benchmarks of --benchmark; returns 1 if a figure is above its limit."""
    check_names(options, "benchmark", BENCHMARKS)
    device = jax.devices()[0]
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "device": f"{device.platform} {device.device_kind} x {jax.device_count()}",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "jax": jax.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    failures = []
    for name in options.benchmark:
        print(f"\n{name}{describe_time(name, options)}", flush=True)
        failures += [f"{name}: {text}" for text in print_report(BENCHMARKS[name](options))]
    for failure in failures:
        print(f"over the limit: {failure}")
    return 1 if failures else 0


def describe_time(name: str, options: flags.FlagValues) -> str:
    """Writes how long a benchmark is expected to take; "" where this is not known.

    Args:
        name: Of the benchmark.
        options: The flags.
    """
    if name not in CPU_SECONDS:
        return ""
    text = f", about {CPU_SECONDS[name]} s of CPU with five rounds"
    if name.startswith("train_") and options.baseline != "none":
        text += ", and PyTorch's"
    return text


if __name__ == "__main__":
    cli.run(main, FLAGS)
