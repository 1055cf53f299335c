"""Every experiment of a preset in workers, and the report, which is updated whenever one ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from experiments import verdicts
from experiments.lab.devices import count_cores, has_accelerator
from experiments.reproducing.processes import ProcessResult, run_commands
from experiments.reproducing.sections import (
    RunRecord,
    answer_sections,
    list_runs,
    list_untested,
    make_section,
    run_command,
    save_time,
)
from experiments.verdicts.page import UNFINISHED
from rank_collapse import runs
from rank_collapse.runs import files

SIGNAL_CODES = 128  # above it an exit code is of a process that a signal ended
SIZES = {
    "quick": "Sizes are those of the preset “quick”: small networks and few seeds, for minutes on "
    "two cores. Results at full size stand with them.",
    "paper": "Networks are as large as the published ones; tokens, seeds and epochs are fewer "
    "where they would take more than an hour and a half on two cores.",
}


def run_experiments(
    names: Sequence[str],
    options: flags.FlagValues,
    parent: Path,
    show: Callable[[list[verdicts.Section]], None],
) -> list[verdicts.Section]:
    """Runs each experiment in a folder of its name and reads it.

    Args:
        names: In the order of the report, in which they run.
        options: The flags.
        parent: Of the folders.
        show: Called with the sections before the first run, and whenever one ends.

    Returns:
        The sections.
    """
    arguments = {name: list_runs(name, options.preset) for name in names}
    shared = ["--overwrite"] if options.overwrite else []
    shared += [f"--num_devices={options.num_devices}"] if options.num_devices else []
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
    sections = {name: make_section(name, (), "waiting") for name in names}

    def show_all() -> None:
        active = [run for run in commands if run not in results][:jobs]
        running = {run.partition("/")[0] for run in active}
        for name, section in sections.items():
            if section.status in UNFINISHED:
                status = "running" if name in running else "waiting"
                sections[name] = replace(section, status=status)
        show(list(sections.values()))

    def on_end(run: str, result: ProcessResult) -> None:
        results[run], name = result, run.partition("/")[0]
        if run not in complete and result.seconds:
            save_time(parent, run, result, min(jobs, len(commands)), run in begun)
        if result.code > SIGNAL_CODES:  # to be resumed
            return
        if results.keys() >= arguments[name].keys():
            sections[name] = make_section(name, [make_record(name, r) for r in arguments[name]])
        show_all()

    def make_record(name: str, run: str) -> RunRecord:
        folder, result = parent / run, results[run]
        details = f"{result.seconds:.1f} s this time; all numbers: {folder}/results.csv"
        command, label = run_command(run, arguments[name][run], folder), run.partition("/")[2]
        return RunRecord(folder, command, details, label, result.code, result.output)

    show_all()
    run_commands(commands, jobs, on_end)
    return list(sections.values())


def default_jobs() -> int:
    """Returns how many experiments run side by side.

    Two on two cores or more: compiling and much of an experiment take one. On an accelerator one
    at a time, because the first process takes its memory.
    """
    return 2 if count_cores() > 1 and not has_accelerator() else 1


def render_report(
    sections: list[verdicts.Section], preset: str, started: float, parent: Path
) -> str:
    """Renders the report: all sections under one heading, with the machine that ran them.

    Args:
        sections: Of all experiments.
        preset: Their sizes.
        started: When, by `time.monotonic`.
        parent: Of the run folders.
    """
    answers = answer_sections(sections)
    ended = [s.name for s in sections if s.status not in UNFINISHED]
    progress = f"{len(ended)} of {len(sections)} experiments have ended"
    return verdicts.render(
        "Rank collapse: measured and published",
        "What attention, skips, MLPs and norms do to the differences between tokens, measured "
        "beside Dong, Cordonnier and Loukas, “Attention is not all you need: pure attention loses "
        f"rank doubly exponentially with depth” (2021). {SIZES[preset]}"
        + (f" {progress}; reload this page for more." if len(ended) < len(sections) else ""),
        sections,
        f"{progress}, after {time.monotonic() - started:.0f} s. {describe_machine(parent)}",
        answers,
        list_untested(answers, ended),
    )


def describe_machine(parent: Path) -> str:
    """Says when and on which machine the newest run was made; "" where there is none."""
    paths = sorted(parent.rglob("config.json"), key=lambda path: path.stat().st_mtime)
    try:
        environment = files.read_object(paths[-1])["environment"]
        versions = ", ".join(f"{n} {version}" for n, version in environment["versions"].items())
        return (
            f"Made {environment['started']} on {environment['device']} "
            f"({environment['num_devices']} devices), Python {environment['python']}, {versions}, "
            f"git {environment['git'] or 'none'}."
        )
    except (runs.RunError, IndexError, KeyError, TypeError, AttributeError):
        return ""
