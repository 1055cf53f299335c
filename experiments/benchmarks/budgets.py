"""CPU seconds of every experiment at its quick sizes, beside its budget.

    python -m experiments.benchmark --benchmark=budgets

A process for each run, one after another, without compiled programs of earlier ones. Other work on
the machine makes these numbers larger.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.benchmarks.timing import Report, Timing
from experiments.shell.experiment import experiment_of

# {experiment: CPU seconds}
BUDGETS = {
    "run_collapse": 27,
    "run_path_counts": 3,
    "run_path_chains": 10,
    "run_architectures": 25,
    "run_sort": 18,
    "run_convex_hull": 22,
    "run_memorization": 18,
    "run_circle": 24,
    "run_width": 18,
    "run_transformer": 17,
    "run_attention_forms": 20,
    "run_stability": 18,
    "run_trainability": 16,
    "check_bounds": 18,
}


def budgets(options: Any, preset: str = "quick") -> Report:
    """CPU seconds of all runs of a preset, by experiment."""
    timings, figures = [], {}
    for name, budget in BUDGETS.items():
        begun, used = time.perf_counter(), cpu_of_children()
        for arguments in experiment_of(name).runs(preset).values():
            with tempfile.TemporaryDirectory() as folder:
                where = (f"--output_dir={folder}/run", f"--num_devices={options.num_devices}")
                subprocess.run(
                    [sys.executable, "-m", f"experiments.{name}", *arguments, *where],
                    env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
        timings.append(Timing(name, 0.0, [time.perf_counter() - begun]))
        figures[f"CPU seconds of {name}"] = (cpu_of_children() - used, float(budget))
    total = sum(seconds for seconds, _ in figures.values())
    figures["CPU seconds of all"] = (total, float(sum(BUDGETS.values())))
    return Report(timings, timings[0].name, figures)


def cpu_of_children() -> float:
    """Seconds that processes which have ended took of all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
