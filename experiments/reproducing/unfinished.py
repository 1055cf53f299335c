"""Every experiment of a preset in workers, and the report, which is shown whenever one ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from experiments import verdicts
from experiments.lab.devices import count_cores, has_accelerator
from experiments.reproducing.processes import Ended, run_all
from experiments.reproducing.sections import (
    Made,
    answers_of,
    command_text,
    keep_time,
    runs_of,
    section_of,
    untested,
)
from experiments.verdicts.page import UNFINISHED
from rank_collapse import runs
from rank_collapse.runs import files

SIZES = {
    "quick": "Sizes are those of the preset “quick”: small networks and few seeds, for minutes on "
    "two cores. Results at full size stand with them.",
    "paper": "Sizes are the published ones.",
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
    """
    runs_by_name = {name: runs_of(name, options.preset) for name in names}
    commands, whole, ends = {}, set(), {}
    for name, own in runs_by_name.items():
        for run, arguments in own.items():
            folder = parent / run
            given = [*arguments, f"--output_dir={folder}"]
            if options.overwrite:
                given.append("--overwrite")
            if options.num_devices:
                given.append(f"--num_devices={options.num_devices}")
            if options.overwrite or not folder.exists():  # not what an earlier run left over
                whole.add(run)
            commands[run] = [f"experiments.{name}", *given]
    jobs = options.jobs or default_jobs(options.preset)
    sections = {name: section_of(name, (), "waiting") for name in names}

    def show_all() -> None:
        active = {run.partition("/")[0] for run in [r for r in commands if r not in ends][:jobs]}
        for name, section in sections.items():
            if section.status in UNFINISHED:
                sections[name] = replace(section, status="running" if name in active else "waiting")
        show(list(sections.values()))

    def ended(run: str, how: Ended) -> None:
        ends[run], name = how, run.partition("/")[0]
        if run in whole and not how.code:
            keep_time(parent, run, how, min(jobs, len(commands)))
        if ends.keys() >= runs_by_name[name].keys():
            found = [made(run, arguments) for run, arguments in runs_by_name[name].items()]
            sections[name] = section_of(name, found)
        show_all()

    def made(run: str, arguments: Sequence[str]) -> Made:
        folder, how = parent / run, ends[run]
        details = f"{how.seconds:.1f} s this time; all numbers: {folder}/results.csv"
        command, label = command_text(run, arguments, folder), run.partition("/")[2]
        return Made(folder, command, details, label, how.code, how.printed)

    show_all()
    run_all(commands, jobs, ended)
    return list(sections.values())


def default_jobs(preset: str) -> int:
    """Two where compiling, which takes one core, is most of the time; else one at a time.

    At the paper's sizes an experiment uses all cores and much of the memory, and its time is kept
    as a result; on an accelerator the first process takes its memory.
    """
    return 2 if preset == "quick" and count_cores() > 1 and not has_accelerator() else 1


def page(sections: list[verdicts.Section], preset: str, started: float, parent: Path) -> str:
    """The report: all sections under one heading, with what they were made with."""
    answers = answers_of(sections)
    over = [s.name for s in sections if s.status not in UNFINISHED]
    progress = f"{len(over)} of {len(sections)} experiments have ended"
    return verdicts.render(
        "Rank collapse: measured and published",
        "What attention, skips, MLPs and norms do to the differences between tokens, measured "
        "beside Dong, Cordonnier and Loukas, “Attention is not all you need: pure attention loses "
        f"rank doubly exponentially with depth” (2021). {SIZES[preset]}"
        + (f" {progress}; reload this page for more." if len(over) < len(sections) else ""),
        sections,
        f"{progress}, after {time.monotonic() - started:.0f} s. {machine_of(parent)}",
        answers,
        untested(answers, over),
    )


def machine_of(parent: Path) -> str:
    """When and with what the newest run was made; "" where there is none."""
    paths = sorted(parent.rglob("config.json"), key=lambda path: path.stat().st_mtime)
    try:
        made = files.read_object(paths[-1])["environment"]
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        return (
            f"Made {made['started']} on {made['device']} ({made['num_devices']} devices), Python "
            f"{made['python']}, {versions}, git {made['git'] or 'none'}."
        )
    except (runs.RunError, IndexError, KeyError, TypeError, AttributeError):
        return ""
