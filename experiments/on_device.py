"""Checks and times a device: two commands, one folder, the pages.

    experiments/on_device.sh right FOLDER
    experiments/on_device.sh speed FOLDER
    python -m experiments.on_device --pages --folder=FOLDER --cpu=results/reproduce/quick

Each command ends within its time: a step that takes longer is stopped, and earlier measurements
stay. FOLDER gets speed.jsonl, a line for each benchmark; steps.jsonl, a line for each step with its
exit code and seconds; a log of each step; and arrays.tar.gz, the arrays and tables of all
experiments. --pages writes them into the tables of docs/accelerators.md and docs/benchmarks.md.
--cpu compares the arrays with those of a CPU.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from absl import flags

from experiments.benchmarks import device_pages
from experiments.lab import cli
from rank_collapse.runs.files import make_folder, open_log, write_atomically

REPOSITORY = Path(__file__).resolve().parents[1]
# Seconds of each part, with those to start, to pack and to stop what takes longer.
LIMITS = {"right": 280, "speed": 330}
RESERVE, PATIENCE = 15, 5
KEPT = ("arrays.npz", "results.csv", "config.json", "summary.json")
ARRAYS, STEPS = "arrays.tar.gz", "steps.jsonl"

FLAGS = cli.bare_flags()
FLAGS.define("enum", "part", None, "What is measured.", list(LIMITS))
FLAGS.define("string", "folder", None, "Folder of all measurements.")
FLAGS.define("boolean", "tiny", False, "Small sizes, which show nothing but that everything works.")
FLAGS.define("boolean", "pages", False, "Write what a folder has into the tables of the pages.")
FLAGS.define("string", "docs", "docs", "Folder of the pages.")
FLAGS.define("string", "cpu", "", "Folder of the experiments' runs on a CPU, to compare with.")


@dataclass
class Step:
    """A command with the most seconds that it may take.

    Attributes:
        name: Name of the log file.
        command: Its arguments, without the interpreter.
        seconds: The most.
        environment: Variables in addition to the environment of this process.
    """

    name: str
    command: Sequence[str]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


def main(options: flags.FlagValues) -> int:
    """Measures a part, or writes the pages; returns 1 if a step failed or was stopped."""
    if not options.folder or options.pages == bool(options.part):
        raise ValueError("--folder= is needed, and one of --part=right, --part=speed and --pages")
    folder = Path(options.folder).resolve()
    if options.pages:
        lines = read_lines(folder / "speed.jsonl") + read_lines(folder / STEPS)
        differences = compare_arrays(folder / ARRAYS, Path(options.cpu)) if options.cpu else []
        for path in device_pages.write_pages(Path(options.docs), lines, differences):
            print(f"written to {path}")
        return 0
    make_folder(folder)
    end = time.monotonic() + LIMITS[options.part] - RESERVE
    with tempfile.TemporaryDirectory() as runs:
        steps = list_steps(options.part, folder, Path(runs), options.tiny)
        try:
            codes = [code for group in steps for code in run_steps(group, folder, end)]
        finally:
            if options.part == "right":
                pack_arrays(Path(runs), folder / ARRAYS)
    return 1 if any(codes) else 0


def list_steps(part: str, folder: Path, runs: Path, tiny: bool) -> list[list[Step]]:
    """Lists groups of steps: the steps of a group run side by side, the groups one after the other.

    Args:
        part: Part of the session, a key of `LIMITS`.
        folder: Folder for speed.jsonl.
        runs: Folder for the experiments' folders.
        tiny: Whether sizes are small.
    """

    def benchmark(name: str, names: str, seconds: float, *arguments: str) -> list[Step]:
        """Lists the step that runs benchmarks, as a list of one.

        Args:
            name: Name of the step.
            names: Names of the benchmarks, with commas between them.
            seconds: Expected time.
            *arguments: Further flags.
        """
        command = ["-m", "experiments.benchmark", f"--benchmark={names}"]
        command += [f"--json={folder / 'speed.jsonl'}", *arguments]
        return [Step(name, command + ["--tiny", "--rounds=1"] * tiny, seconds)]

    products = benchmark("products", "products", 60)
    if part == "right":
        reproduce = ["-m", "experiments.reproduce", f"--output_dir={runs}", "--jobs=5"]
        tests = [f"tests/{name}" for name in ("measures", "network", "paths", "theory")]
        processes = min(9, max(1, (os.cpu_count() or 1) - 5))
        if tiny:
            reproduce += ["--only=run_path_counts"]
            tests, processes = ["tests/measures/test_listings.py"], 0
        tests = ["-m", "pytest", *tests, f"-n{processes}", "--tb=short", "-p", "no:cacheprovider"]
        # Products as exact as the commands have them, and programs as users compile them.
        exact = {
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        }
        both = [Step("reproduce", reproduce, 260), Step("tests", tests, 260, exact)]
        return [products, both]
    counts = "1,3" if tiny else "1,16,64,256,1024,4096"
    trained = "train_sort,train_convex_hull,train_memorization"
    path_sums = "exact_paths,exact_paths_large,head_contributions,log_profile,recomputed_paths"
    if tiny:
        trained, path_sums = "train_sort", "log_profile"
    return [
        products,
        benchmark("torch", trained, 120, "--baseline=torch", "--rounds=3"),
        benchmark("paths", path_sums, 70, "--rounds=3"),
        benchmark("sweep", "collapse_sweep", 45, f"--num_seeds={counts}", "--rounds=2"),
        benchmark("seeds", "seeds", 120, "--rounds=2", *["--num_seeds=1"] * tiny),
    ]


def run_steps(steps: Sequence[Step], folder: Path, end: float) -> list[int]:
    """Runs steps side by side; stops those that take longer. Returns their exit codes.

    Args:
        steps: The commands.
        folder: Folder for their logs, and for a line about each.
        end: Time at which all must have ended, as in `time.monotonic`.
    """
    started, codes = [], []
    with contextlib.ExitStack() as stack:
        for step in steps:
            log = stack.enter_context(open(folder / f"{step.name}.log", "wb"))
            process = subprocess.Popen(
                [sys.executable, *step.command],
                cwd=REPOSITORY,
                env=os.environ | step.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its workers can be stopped too
            )
            stack.callback(_stop, process)
            started.append((step, process, time.monotonic()))
            print(f"{step.name}: {folder / step.name}.log", flush=True)
        for step, process, begun in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, min(begun + step.seconds, end) - time.monotonic()))
            is_stopped = process.poll() is None
            _stop(process)
            seconds = time.monotonic() - begun
            log = (folder / f"{step.name}.log").read_text("utf-8", "replace").rstrip()
            last = log.rpartition("\n")[2][-300:]
            line = {
                "step": step.name,
                "code": None if is_stopped else process.returncode,
                "seconds": round(seconds, 1),
                "last_line": last,
                "driver": read_driver(),
                "python": platform.python_version(),
            }
            with open_log(folder / STEPS) as file:
                file.write(f"{json.dumps(line)}\n".encode())
            end_of_step = "stopped" if is_stopped else f"exit code {process.returncode}"
            print(f"{step.name}: {end_of_step} after {seconds:.0f} s: {last}", flush=True)
            codes.append(1 if is_stopped else process.returncode)
    return codes


def _stop(process):
    """Ends a process and all processes that it started; it is asked first, so that it can save its
    results."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)


def read_driver() -> str | None:
    """Reads name and driver of NVIDIA's devices; None without any."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
    return answer.stdout.strip() or None


def pack_arrays(runs: Path, path: Path) -> None:
    """Packs the arrays and tables of all runs.

    Args:
        runs: Parent of the run folders.
        path: Path of the archive.
    """
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for kept_file in sorted(p for p in runs.rglob("*") if p.name in KEPT):
                archive.add(kept_file, kept_file.relative_to(runs).as_posix())
        file.seek(0)
        write_atomically(path, file.read())


def compare_arrays(archive: Path, cpu: Path) -> list[device_pages.Difference]:
    """Compares the complete runs of a device with the same runs on a CPU.

    Args:
        archive: Archive from `pack_arrays`.
        cpu: Folder of the runs on a CPU.

    Raises:
        ValueError: The folder does not exist, or has other arrays.
    """
    if not cpu.is_dir() or not archive.exists():
        raise ValueError(f"--cpu={cpu}: the comparison needs this folder and {archive}")
    differences = []
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
        for path in sorted(Path(folder).rglob("summary.json")):
            # Folders of reproduce lie below that of the preset.
            name = Path(*path.parent.relative_to(folder).parts[1:])
            if (cpu / name / "summary.json").exists():
                pair = path.parent, cpu / name
                differences.append(device_pages.compare_runs(name.as_posix(), *pair))
    return differences


def read_lines(path: Path) -> list[dict]:
    """Reads the lines of a file of JSON; none where there is no file.

    Raises:
        ValueError: A line is damaged.
    """
    if not path.exists():
        return []
    lines = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return lines


if __name__ == "__main__":
    cli.run(main, FLAGS)
