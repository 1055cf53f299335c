"""Benchmarks: time, compilation and memory of the computations that have a target.

    python -m experiments.benchmark                              (all of them)
    python -m experiments.benchmark --benchmark=exact_paths,recomputed_paths
    python -m experiments.benchmark --baseline=torch             (training beside PyTorch)
    python -m experiments.benchmark --benchmark=train_sort --num_seeds=256

Each benchmark times its cases in turn, round after round, so that other work on the machine slows
all of them equally. Ratios to the baseline are from the same rounds. Compilation is timed
separately; the time of a case is that of its fastest round.
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
    "exact_paths": paths.time_exact_paths,
    "head_contributions": paths.time_head_contributions,
    "recomputed_paths": paths.time_recomputed_paths,
    "monitor": monitoring.time_monitor,
    "seeds": seeds.time_seeds,
} | {f"train_{name}": partial(training.time_training, name) for name in training.CASES}

FLAGS = cli.bare_flags()
FLAGS.define("integer", "num_devices", 0, "Devices (0: all; on a CPU one per core).", lower_bound=0)
FLAGS.define("list", "benchmark", list(BENCHMARKS), f"Benchmarks, out of {', '.join(BENCHMARKS)}.")
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
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    failures = []
    for name in options.benchmark:
        print(f"\n{name}")
        failures += [f"{name}: {text}" for text in print_report(BENCHMARKS[name](options))]
    for failure in failures:
        print(f"over the limit: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    cli.run(main, FLAGS)
