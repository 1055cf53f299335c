"""Every experiment of a preset in workers, and the report, which is written anew as they end."""

import contextlib
import importlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from absl import flags

from experiments import verdicts
from experiments.lab import cli, count_cores, has_accelerator, pool, progress, provenance
from experiments.reproducing import terminal
from experiments.reproducing.sections import (
    RunRecord,
    answer_sections,
    list_runs,
    make_section,
    run_command,
    save_time,
    until_decided,
)
from rank_collapse import runs
from rank_collapse.runs import files

SIGNAL_CODES = 128  # above it an exit code is of a process that a signal ended
SIZES = {
    "quick": "“Here” names this run at the preset “quick”: small networks and few seeds, which "
    "take minutes on two cores. The pictures show this run. “Reference run” names a run at the "
    "preset “reported”; the project’s pages give its numbers.",
    "reported": "“Here” names this run, “Reference run” an earlier run of the same sizes; the "
    "project’s pages give its numbers. Networks are as large as the published ones. Tokens, seeds "
    "and epochs are fewer where they would take more than an hour and a half on two cores.",
}


class ProcessResult(NamedTuple):
    """How a run ended.

    Attributes:
        code: Its exit code.
        output: Everything that it printed.
        seconds: Its time.
        cpu_seconds: Its time on all cores, of this process alone.
    """

    code: int
    output: str
    seconds: float
    cpu_seconds: float


def run_binary(module: str, *arguments: str) -> ProcessResult:
    """Runs a binary as `python -m module` would, in this process.

    Args:
        module: Module of the binary.
        *arguments: Values of its flags.
    """
    binary = importlib.import_module(module)
    start, start_of_cpu = time.monotonic(), time.process_time()
    sys.modules["__main__"], sys.argv = binary, [str(binary.__file__), *arguments]
    # Of several experiments, whose lines would be mixed: `terminal` says what they do.
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        code = cli.execute(binary.main, binary.FLAGS, arguments)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - start_of_cpu
    return ProcessResult(code, output.getvalue(), seconds, cpu_seconds)


def run_commands(
    commands: Mapping[str, Sequence[str]], jobs: int
) -> Iterator[tuple[str, ProcessResult]]:
    """Runs commands in their order, some at a time.

    Args:
        commands: {name: (module, *arguments)}.
        jobs: Commands at a time.

    Yields:
        (name, result) of each command as it ends; also of those that a signal ended.

    Raises:
        Stopped: A signal asked for it.
    """
    remaining, running = dict(commands), {}
    try:
        while remaining:
            with pool.start_workers(jobs) as executor:
                work = {name: (run_binary, *remaining[name]) for name in remaining}
                running = {}
                for name, future in pool.iterate_ended(executor, work, jobs, running):
                    del remaining[name]
                    try:
                        yield name, future.result()
                    except BrokenProcessPool:  # its process died: the others go on
                        progress.raise_if_stopped()
                        yield (
                            name,
                            ProcessResult(1, "its process was ended (out of memory?)", 0.0, 0.0),
                        )
                        break
    except progress.Stopped:
        for future, name in running.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                yield name, future.result()
        raise


def run_experiments(
    names: Sequence[str],
    options: flags.FlagValues,
    parent: Path,
    show: Callable[[list[verdicts.Section]], None],
) -> list[verdicts.Section]:
    """Runs each experiment in a folder of its name and reads it.

    Args:
        names: Names of the experiments in the order in which they run and are reported.
        options: The flags.
        parent: Folder that holds the run folders.
        show: Called with the sections of the finished experiments, before the first and after each.

    Returns:
        The sections.
    """
    arguments = {name: list_runs(name, options.preset) for name in names}
    if options.until:
        arguments = {
            name: {run: until_decided(name, flags) for run, flags in named_runs.items()}
            for name, named_runs in arguments.items()
        }
    shared = ["--overwrite"] if options.overwrite else []
    shared += [f"--num_devices={options.num_devices}"] if options.num_devices else []
    draws_pdf = options.preset != "quick" if options.pdf is None else options.pdf
    shared += [] if draws_pdf else ["--nopdf"]
    commands = {
        run: [f"experiments.{name}", *flags, f"--output_dir={parent / run}", *shared]
        for name, named_runs in arguments.items()
        for run, flags in named_runs.items()
    }
    resumable = () if options.overwrite else commands
    begun = {run for run in resumable if (parent / run).exists()}
    complete = {run for run in resumable if (parent / run / "summary.json").exists()}
    jobs = options.jobs or default_jobs()
    results: dict[str, ProcessResult] = {}
    sections: dict[str, verdicts.Section] = {}

    def make_record(name: str, run: str) -> RunRecord:
        """Describes one finished run: its folder, command, seconds, exit code and output."""
        folder, result = parent / run, results[run]
        details = f"{result.seconds:.1f} s this time; all numbers: {folder}/results.csv"
        command, label = run_command(run, arguments[name][run], folder), run.partition("/")[2]
        return RunRecord(folder, command, details, label, result.code, result.output)

    usual = terminal.read_times(options.preset)
    expected = {
        run: terminal.SECONDS_TO_READ if run in complete else usual.get(run, terminal.USUAL_SECONDS)
        for run in commands
    }
    show([])
    with terminal.Screen(expected, jobs, parent) as screen:
        for run, result in run_commands(commands, jobs):
            results[run], name = result, run.partition("/")[0]
            screen.end(run, result.seconds)
            if run not in complete and result.seconds:
                save_time(parent, run, result, min(jobs, len(commands)), run in begun)
            was_stopped = result.code > SIGNAL_CODES  # to be resumed
            if not was_stopped and results.keys() >= arguments[name].keys():
                sections[name] = make_section(name, [make_record(name, r) for r in arguments[name]])
                show([sections[name] for name in names if name in sections])
                cpu_seconds = sum(results[run].cpu_seconds for run in arguments[name])
                place = f"{len(sections)}/{len(names)}"
                screen.say(terminal.describe_ended(place, sections[name], cpu_seconds))
    return [sections[name] for name in names if name in sections]


def default_jobs() -> int:
    """Returns how many experiments run side by side.

    Two on two cores or more, because compilation and many experiments use one core. One on an
    accelerator, because the first process takes its memory.
    """
    return 2 if count_cores() > 1 and not has_accelerator() else 1


def render_report(
    sections: list[verdicts.Section], count: int, preset: str, started: float, parent: Path
) -> str:
    """Renders the report: all sections under one heading, with the machine that ran them.

    Args:
        sections: Sections of the experiments that have ended.
        count: Number of all experiments.
        preset: Preset of the sizes of the runs.
        started: Time of the start, by `time.monotonic`.
        parent: Folder that holds the run folders.
    """
    ended = f"{len(sections)} of {count} experiments have ended"
    return verdicts.render(
        "Rank collapse: measured and published",
        "What attention, skips, MLPs and norms do to the differences between tokens, measured "
        "beside Dong, Cordonnier and Loukas, “Attention is not all you need: pure attention loses "
        f"rank doubly exponentially with depth” (2021). {SIZES[preset]}"
        + (f" {ended}; reload this page for more." if len(sections) < count else ""),
        sections,
        f"{ended}, after {time.monotonic() - started:.0f} s. {describe_machine(parent)}",
        answer_sections(sections, preset),
    )


def describe_machine(parent: Path) -> str:
    """Describes when and on which machine the newest run was made; "" if there is none."""
    paths = sorted(parent.rglob("config.json"), key=lambda path: path.stat().st_mtime)
    try:
        saved = files.read_object(paths[-1])
        environment = saved["environment"]
        versions = ", ".join(f"{n} {version}" for n, version in environment["versions"].items())
        return (
            f"Made {environment['started']} on {environment['device']} "
            f"({environment['num_devices']} devices), Python {environment['python']}, {versions}, "
            f"git {provenance.list_commits(saved) or 'none'}."
        )
    except (runs.RunError, IndexError, KeyError, TypeError, AttributeError):
        return ""
