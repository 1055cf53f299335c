"""Benchmarks: time, compilation and memory of the computations that have a target.

    python -m experiments.benchmark                              (those of less than a minute)
    python -m experiments.benchmark --benchmark=exact_paths,recomputed_paths
    python -m experiments.benchmark --baseline=torch             (the same, training with PyTorch)
    python -m experiments.benchmark --benchmark=exact_profile    (by name, also one of minutes)
    python -m experiments.benchmark --benchmark=train_sort --num_seeds=256

Each benchmark times its cases in turn, round after round, so that other work on the machine slows
all of them equally. Ratios to the baseline are from the same rounds. Compilation is timed
separately; the time of a case is the time of its fastest round. Each benchmark first prints its
name and the time that it takes on two idle cores, and then every first call and round as it ends.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
from absl import flags

from experiments.benchmarks import (
    experiment_parts,
    limits,
    monitoring,
    path_benchmarks,
    profile_benchmarks,
    seed_benchmarks,
    sweep_overhead,
    training_benchmarks,
    training_parts,
)
from experiments.benchmarks.timing import Report, describe_report, print_report
from experiments.lab import check_names, cli
from rank_collapse.runs.files import make_folder, open_log

# Each is a function of the flags that gives a `timing.Report`.
BENCHMARKS = (
    {
        "collapse_sweep": profile_benchmarks.time_collapse_sweep,
        "log_profile": profile_benchmarks.time_log_profile,
        "exact_profile": profile_benchmarks.time_exact_profile,
        "exact_paths": path_benchmarks.time_exact_paths,
        "exact_paths_large": partial(
            path_benchmarks.time_exact_paths,
            config=path_benchmarks.LARGE,
            num_tokens=path_benchmarks.LARGE_TOKENS,
        ),
        "head_contributions": path_benchmarks.time_head_contributions,
        "recomputed_paths": path_benchmarks.time_recomputed_paths,
        "monitor": monitoring.time_monitor,
        "products": limits.time_products,
        "seeds": seed_benchmarks.time_seeds,
        "sweep_overhead": sweep_overhead.time_overhead,
        "experiments": experiment_parts.time_experiments,
    }
    | {
        f"train_{name}": partial(training_benchmarks.time_training, name)
        for name in training_benchmarks.CASES
    }
    | {
        f"parts_{name}": partial(training_parts.time_training_parts, name)
        for name in training_parts.NAMES
    }
)

# Seconds of CPU that each takes with five rounds; beyond `LONG` it runs only where it is named.
CPU_SECONDS = {
    "collapse_sweep": 25,
    "log_profile": 7,
    "exact_profile": 600,
    "exact_paths": 60,
    "exact_paths_large": 3000,
    "head_contributions": 90,
    "recomputed_paths": 5,
    "monitor": 120,
    "products": 2,
    "seeds": 600,
    "sweep_overhead": 50,
    "experiments": 580,
    "train_sort": 20,
    "train_convex_hull": 40,
    "train_memorization": 60,
    "train_translation": 60,
    "parts_sort": 100,
    "parts_convex_hull": 180,
    "parts_memorization": 180,
}
LONG = 90
# Sizes of --tiny, which show nothing but that a benchmark works.
TINY = {
    "collapse_sweep": {"depth": 2, "num_tokens": 4, "d_model": 8},
    "log_profile": {"depth": 2, "num_tokens": 4, "d_model": 8},
    "exact_profile": {"depth": 2, "num_tokens": 4, "d_model": 8},
    "exact_paths": {"config": path_benchmarks.TINY, "num_tokens": 4},
    "exact_paths_large": {"config": path_benchmarks.TINY, "num_tokens": 4},
    "head_contributions": {"config": path_benchmarks.TINY, "num_tokens": 4},
    "recomputed_paths": {"depth": 2, "num_sequences": 3},
    "monitor": {"depth": 2, "num_heads": 2, "d_model": 8, "tokens": 4},
    "products": {"width": 64},
    "seeds": seed_benchmarks.TINY,
    "sweep_overhead": {"num_seeds": 2, "lengths": (6, 8), "calls": (2,)},
    "experiments": {"names": ["run_path_counts"], "arguments": ["--heads=2", "--layers=3"]},
} | {
    name: {"arguments": training_benchmarks.TINY}
    for name in BENCHMARKS
    if name.startswith(("train_", "parts_"))
}
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
FLAGS.define(
    "enum", "baseline", "none", "Also time training in PyTorch.", training_benchmarks.BASELINES
)
FLAGS.define(
    "list",
    "num_seeds",
    [],
    "Seeds at a time, of training, collapse_sweep and seeds, by commas (default: as many as on the "
    "page).",
)
FLAGS.define("integer", "rounds", 5, "Timed rounds.", lower_bound=1)
FLAGS.define("boolean", "tiny", False, "Sizes that show nothing but that a benchmark works.")
FLAGS.define("string", "json", "", "File that gets a line of JSON for each benchmark.")


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
    if options.json:
        make_folder(os.path.dirname(options.json) or ".")
    failures = []
    for name, label, measure in list_benchmarks(options):
        print(f"\n{label}{describe_time(name, options)}", flush=True)
        report = measure(options)
        failures += [f"{label}: {text}" for text in print_report(report)]
        if options.json:
            line = json.dumps({"machine": machine, **describe_report(label, report)})
            with open_log(options.json) as file:
                file.write(f"{line}\n".encode())
    for failure in failures:
        print(f"over the limit: {failure}")
    return 1 if failures else 0


def list_benchmarks(
    options: flags.FlagValues,
) -> Iterator[tuple[str, str, Callable[[flags.FlagValues], Report]]]:
    """Lists (name, name with the number of seeds, function of the flags) of each benchmark.

    Args:
        options: The flags.

    Raises:
        ValueError: An invalid number of seeds.
    """
    for text in options.num_seeds:
        if not (text.isascii() and text.isdigit() and int(text)):
            raise ValueError(f"--num_seeds={text} is not a whole number of at least 1")
    counts = list(map(int, options.num_seeds))
    for name in options.benchmark:
        measure = partial(BENCHMARKS[name], **(TINY.get(name, {}) if options.tiny else {}))
        if name == "seeds":
            for network, size in seed_benchmarks.SIZES.items():
                sizes = {network: seed_benchmarks.TINY_SIZE if options.tiny else size}
                call = partial(measure, sizes=sizes, num_seeds=counts)
                yield name, f"seeds, {network}", call
        elif counts and (name.startswith("train_") or name == "collapse_sweep"):
            for count in counts:
                yield name, f"{name}, {count} seeds", partial(measure, num_seeds=count)
        else:
            yield name, name, measure


def describe_time(name: str, options: flags.FlagValues) -> str:
    """Writes how long a benchmark is expected to take; "" where this is not known.

    Args:
        name: Name of the benchmark.
        options: The flags.
    """
    if name not in CPU_SECONDS or options.tiny:
        return ""
    text = f", about {CPU_SECONDS[name]} s of CPU with five rounds"
    if name.startswith("train_") and options.baseline != "none":
        text += ", and PyTorch's"
    return text


if __name__ == "__main__":
    cli.run(main, FLAGS)
