"""What the CPU time of the quick experiments consists of: tracing, compiling, and all else."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from absl.flags import FlagValues

from experiments.benchmarks.timing import Report, Timing, say
from experiments.lab import describe_experiment, list_experiments
from experiments.reproducing.running import run_binary
from experiments.reproducing.sections import list_runs
from rank_collapse.runs.files import RunError

REPOSITORY = Path(__file__).parents[2]
# Events of `jax.monitoring` with the seconds that a program took.
TRACING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
COMPILING = "/jax/core/compile/backend_compile_duration"


class Parts(NamedTuple):
    """The time of an experiment in a process of its own, on one device.

    Attributes:
        cpu_seconds: CPU time of the process, with its imports.
        tracing_seconds: Time in which JAX traced functions and lowered them to programs.
        compiling_seconds: Time in which XLA compiled the programs.
        programs: Number of compiled programs.
    """

    cpu_seconds: float
    tracing_seconds: float
    compiling_seconds: float
    programs: int


@contextlib.contextmanager
def record_events() -> Iterator[list[tuple[str, float]]]:
    """Records (event, seconds) of the programs that JAX traces and compiles in the context."""
    events: list[tuple[str, float]] = []

    def record(event: str, seconds: float, **_: object) -> None:
        events.append((event, seconds))

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


def sum_events(events: Sequence[tuple[str, float]], cpu_seconds: float) -> Parts:
    """Sums the events of an experiment.

    Args:
        events: (event, seconds); a function that is traced within another one has its own event,
            so `tracing_seconds` counts it twice.
        cpu_seconds: CPU time of the experiment.
    """
    compiling = [seconds for event, seconds in events if event == COMPILING]
    tracing = [seconds for event, seconds in events if event in TRACING]
    return Parts(cpu_seconds, sum(tracing), sum(compiling), len(compiling))


def time_experiment(name: str, arguments: Sequence[str] = ()) -> Parts:
    """Runs an experiment at quick size in a new process, which compiles everything.

    Args:
        name: Name of the experiment.
        arguments: Further flags, such as those of a smaller size.

    Raises:
        RunError: The experiment failed.
    """
    environment = os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-m", __spec__.name, name, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RunError(f"{name} failed: {process.stderr.strip()[-500:]}")
    return Parts(*json.loads(process.stdout.splitlines()[-1]))


def time_experiments(
    options: FlagValues,
    names: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> Report:
    """Runs the quick experiments one after the other; the baseline is the first.

    Args:
        options: The flags; each experiment runs once, on one device.
        names: Names of the experiments; empty for those whose data are there.
        arguments: Further flags of each experiment.
    """
    names = names or [n for n in list_experiments() if Path(describe_experiment(n).needs).is_dir()]
    parts = {}
    for name in names:
        parts[name] = time_experiment(name, arguments)
        say(describe_parts(name, parts[name]))
    timings = [Timing(n, p.compiling_seconds, [p.cpu_seconds]) for n, p in parts.items()]
    return Report(timings, sum_parts(parts))


def describe_parts(name: str, parts: Parts) -> str:
    """Writes a line for an experiment.

    Args:
        name: Name of the experiment.
        parts: Its times.
    """
    plural = "" if parts.programs == 1 else "s"
    return (
        f"{name}: {parts.cpu_seconds:.1f} s of CPU, {parts.compiling_seconds:.1f} s to compile "
        f"{parts.programs} program{plural}, {parts.tracing_seconds:.1f} s to trace them"
    )


def sum_parts(parts: Mapping[str, Parts]) -> dict[str, tuple[float, float | None]]:
    """Computes the sums over all experiments, and the shares of compiling and tracing.

    Args:
        parts: {name: times of the experiment}.
    """
    cpu = sum(times.cpu_seconds for times in parts.values())
    tracing = sum(times.tracing_seconds for times in parts.values())
    compiling = sum(times.compiling_seconds for times in parts.values())
    programs = sum(times.programs for times in parts.values())
    return {
        "CPU s of all": (cpu, None),
        "share of compiling": (compiling / cpu, None),
        "share of tracing": (tracing / cpu, None),
        "programs of all": (float(programs), None),
    }


def main(name: str, *arguments: str) -> None:
    """Runs an experiment in this process, and prints its times as JSON.

    Args:
        name: Name of the experiment.
        *arguments: Further flags.
    """
    with tempfile.TemporaryDirectory() as folder, record_events() as events:
        for run, flags in list_runs(name, "quick").items():
            shared = (f"--output_dir={folder}/{run}", "--num_devices=1")
            result = run_binary(f"experiments.{name}", *flags, *arguments, *shared)
            if result.code:
                sys.exit(result.output)
    print(json.dumps(sum_events(events, time.process_time())))


if __name__ == "__main__":
    main(*sys.argv[1:])
