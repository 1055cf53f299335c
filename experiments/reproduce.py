"""Reproduce: runs every experiment and writes one report, with an answer to each statement.

Covers the figures of Dong, Cordonnier and Loukas, "Attention is not all you need: pure attention
loses rank doubly exponentially with depth" (2021), and of the note on attention functions (Vaswani
et al. 2017, section 3.2.1), each with its own command.

    python -m experiments.reproduce                   (quick sizes, minutes on two cores)
    python -m experiments.reproduce --preset=paper    (the paper's sizes)

Writes results/reproduce/report.html, one self-contained page, anew whenever an experiment ends. It
lists every statement of the papers with its source and its answer: holds, holds in part, does not
hold, or cannot be said. The answer follows from the rows below it, one per setting, with joint
intervals. Finished experiments are not computed again; the exit code is 1 if an experiment failed.
Speed: `python -m experiments.benchmark`.
"""

import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from experiments.shell import cli, statements
from experiments.shell.devices import accelerated, cores
from experiments.shell.experiment import experiment_of, experiments_of
from experiments.shell.flag_values import check_names
from experiments.shell.process import Ended, run_in_workers
from rank_collapse import report, runs
from rank_collapse.report.markdown import markdown
from rank_collapse.report.page import UNFINISHED
from rank_collapse.runs import files

EXPERIMENTS = experiments_of()  # in the order of the report
PRESETS = ("quick", "paper")
# CPU seconds that an experiment may take at the quick sizes, on two cores and without a cache.
BUDGET = {
    "run_collapse": 25,
    "run_path_counts": 3,
    "run_path_chains": 9,
    "run_architectures": 25,
    "run_sort": 16,
    "run_convex_hull": 20,
    "run_memorization": 17,
    "run_circle": 25,
    "run_width": 20,
    "run_transformer": 18,
    "run_attention_forms": 21,
    "run_phase": 25,
    "run_stability": 17,
    "run_cures": 19,
    "run_language_model": 20,
    "run_trainability": 12,
    "check_bounds": 17,
}

FLAGS = cli.make_flags("reproduce")
define = cli.definer(FLAGS)
define("enum", "preset", "quick", "Sizes of the experiments.", PRESETS)
define(
    "boolean",
    "markdown",
    False,
    "Also write results.md and its figures to --docs, from all "
    "run folders there are: those of the preset “paper” where they are complete.",
)
define(
    "integer",
    "jobs",
    0,
    "Experiments that run side by side (0: two at the sizes of “quick” on "
    "two cores or more without an accelerator, else one).",
    lower_bound=0,
)
define("string", "docs", "docs", "Folder of results.md.")
define("list", "only", [], f"Experiments to run, out of {', '.join(EXPERIMENTS)} (default: all).")


def main(options: flags.FlagValues) -> int:
    check_names(options, "only", EXPERIMENTS)
    folder = Path(options.output_dir or "results/reproduce")
    if options.run_name:
        folder = folder / options.run_name
    chosen = [name for name in EXPERIMENTS if not options.only or name in options.only]
    runs.make_folder(folder)  # refused before anything is computed
    if options.markdown:
        runs.make_folder(options.docs)
    jax.config.update("jax_platforms", "cpu")  # accelerators are the workers'
    started, path = time.monotonic(), folder / "report.html"

    def show(sections: list[report.Section]) -> None:
        text = page(sections, options.preset, started, folder / options.preset)
        runs.write_atomically(path, text.encode())

    print(f"report, written anew whenever an experiment ends: {path}", flush=True)
    sections = run_experiments(chosen, options, folder / options.preset, show)
    answers = answers_of(sections)
    for answer in answers:
        print(report.answer_lines(answer))
    for text in untested(answers, chosen):
        print(f"{'not tested':14s} {text}")
    failed = [s.name for s in sections if s.status != "done"]
    print(f"{report.count_line(answers)}.")
    print(f"{len(sections) - len(failed)} of {len(sections)} experiments done: {path}")
    if options.markdown:
        print(f"written to {write_markdown(folder, Path(options.docs))}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


class Made(NamedTuple):
    """One run of an experiment, as a section shows it.

    Attributes:
        folder: Where it is.
        command: How it was made.
        details: Small print.
        label: What the run is called, where the experiment has several.
        code, printed: Of the process that made it: a failed one is shown as such.
    """

    folder: Path
    command: str
    details: str
    label: str = ""
    code: int = 0
    printed: str = ""


def runs_of(name: str, preset: str) -> dict[str, Sequence[str]]:
    """{run: its arguments} of an experiment: "run_sort", or "run_phase/cowsik4" of one of several,
    which is also its folder's place among those of the preset."""
    own = experiment_of(name).runs(preset)
    return {f"{name}/{run}" if run else name: arguments for run, arguments in own.items()}


def command_text(run: str, arguments: Sequence[str], folder: Path) -> str:
    """The command of a run."""
    name = run.partition("/")[0]
    return f"python -m experiments.{name} {shlex.join([*arguments, f'--output_dir={folder}'])}"


def run_experiments(
    names: Sequence[str],
    options: flags.FlagValues,
    parent: Path,
    show: Callable[[list[report.Section]], None],
) -> list[report.Section]:
    """Runs each experiment in a folder of its name and reads it.

    Args:
        names: In the order of the report.
        options: The flags.
        parent: Of the folders.
        show: Called with the sections before the first run, and whenever one ends.
    """
    runs_by_name = {name: runs_of(name, options.preset) for name in by_cost(names)}
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
    run_in_workers(commands, [{}] * jobs, ended)
    return list(sections.values())


def by_cost(names: Sequence[str]) -> list[str]:
    """The cheapest, the costliest, the second cheapest, ..: results come early, and two that run
    side by side end together."""
    ordered = sorted(names, key=lambda name: BUDGET.get(name, 0))
    half = (len(ordered) + 1) // 2
    pairs = itertools.zip_longest(ordered[:half], ordered[: half - 1 : -1])
    return [name for pair in pairs for name in pair if name is not None]


def default_jobs(preset: str) -> int:
    """Two where compiling, which takes one core, is most of the time; else one at a time.

    At the paper's sizes an experiment uses all cores and much of the memory, and its time is kept
    as a result; on an accelerator the first process takes its memory.
    """
    return 2 if preset == "quick" and cores() > 1 and not accelerated() else 1


def section_of(name: str, found: Sequence[Made], status: str = "done") -> report.Section:
    """What the run folders of an experiment hold, as one section of the report."""
    own = experiment_of(name)
    figures, claims, comparisons, errors = [], [], [], []
    for made in found:
        label = f"{made.label}: " if made.label else ""
        try:
            if made.code:
                raise runs.RunError(f"exit code {made.code}")
            shown = own.read(made.folder)
            drawn = {path.stem: path for path in (made.folder / "figures").glob("*.png")}
            figures += [
                (drawn[figure].read_bytes(), label + caption)
                for figure, caption in own.captions.items()
                if figure in drawn  # parts of an experiment that a preset leaves out have none
            ]
            claims += shown.claims
            comparisons += shown.comparisons
        except Exception as error:  # one broken experiment must not take the others' report with it
            errors.append(f"{label}{type(error).__name__}: {error}\n{made.printed[-2000:]}")
            print(f"{name} failed: {error}", file=sys.stderr)
    return report.Section(
        name,
        own.title,
        own.claim,
        "\n".join(made.command for made in found),
        "failed" if errors else status,
        figures,
        claims,
        comparisons,
        details=" ".join(f"{made.label} {made.details}".strip() for made in found),
        error="\n".join(errors),
    )


def keep_time(parent: Path, name: str, how: Ended, jobs: int) -> None:
    """Keeps how long a run took that was computed from its beginning in one go.

    Args:
        parent: Of the run folders.
        name: The run, see `runs_of`.
        how: It ended.
        jobs: How many ran side by side.
    """
    own = {"seconds": round(how.seconds, 1), "cpu": how.cpu, "jobs": jobs}
    known = times_of(parent) | {name: own}
    runs.write_atomically(parent / "times.json", json.dumps(known, indent=2).encode())


def times_of(parent: Path) -> dict[str, dict[str, float]]:
    """{run: its seconds, those of the CPU, how many ran side by side}; of a damaged file, none."""
    try:
        found = files.read_object(parent / "times.json")
        names = ("seconds", "cpu", "jobs")
        return {n: {k: float(took.get(k, 0)) for k in names} for n, took in found.items()}
    except (runs.RunError, TypeError, AttributeError, ValueError):
        return {}


def write_markdown(folder: Path, docs: Path) -> Path:
    """docs/results.md and its figures, of every experiment at the largest preset that is done."""
    sections, missing, made_of = [], [], {}
    for name in EXPERIMENTS:
        done = [p for p in reversed(PRESETS) if is_done(name, p, folder / p)]
        if not done:
            missing.append(name)
            continue
        preset, parent, found = done[0], folder / done[0], []
        for run, arguments in runs_of(name, preset).items():
            where, details = parent / run, made_with(parent, run, preset)
            command = command_of(where, command_text(run, arguments, where))
            found.append(Made(where, command, details, run.partition("/")[2]))
        environment = files.read_object(found[0].folder / "config.json")["environment"]
        made_of[name] = preset, environment["started"][:10]
        sections.append(section_of(name, found))
    answers = answers_of(sections)
    left = f" Not run: {', '.join(missing)}." if missing else ""
    text, figures = markdown(
        "Results",
        "Every statement of [the list](statements.md) that is tested here, and every number with "
        "the command, the machine and the time that made it. Written by `python -m "
        "experiments.reproduce --preset=paper --markdown` from the run folders; the preset “paper” "
        "has the published sizes, “quick” is a smaller run where that one was not done." + left,
        sections,
        answers=answers,
        untested=untested(answers, EXPERIMENTS),
    )
    write_statements(docs, answers, made_of)
    for path, png in figures.items():
        runs.make_folder((docs / path).parent)
        runs.write_atomically(docs / path, png)
    runs.write_atomically(docs / "results.md", text.encode())
    return docs / "results.md"


def is_done(name: str, preset: str, parent: Path) -> bool:
    """Whether all runs of an experiment have a summary."""
    return all((parent / run / "summary.json").exists() for run in runs_of(name, preset))


def command_of(folder: Path, otherwise: str) -> str:
    """The command that made a run, which may have had more seeds than its preset."""
    made = files.read_object(folder / "config.json").get("execution")
    command = made.get("command") if isinstance(made, dict) else None
    return command if isinstance(command, str) else otherwise


def made_with(parent: Path, name: str, preset: str) -> str:
    """A run's preset, machine, versions and time.

    Raises:
        RunError: A damaged config.json.
    """
    took = times_of(parent).get(name)
    time_of = "time not kept"
    if took is not None:
        beside = ", another experiment beside it" if took["jobs"] > 1 else ""
        time_of = f"{took['seconds']:.0f} s, compilation included{beside}"
    path = parent / name / "config.json"
    try:
        made = files.read_object(path)["environment"]
        machine = made["device"] if made["backend"] != "cpu" else made.get("processor", "CPU")
        return (
            f"Sizes of the preset “{preset}”, {time_of}, on {made['num_devices']} × {machine}; "
            f"JAX {made['versions']['jax']}, {made['started'][:10]}, "
            f"git {(made['git'] or '')[:10]}."
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise files.damaged(path, f"no entry {error}") from error


def answers_of(sections: list[report.Section]) -> list[report.Answer]:
    """The answers to all statements, from the rows of all sections."""
    return report.answers_of(statements.STATEMENTS, [r for s in sections for r in s.claims])


def untested(answers: list[report.Answer], names: Sequence[str]) -> list[str]:
    """The papers' statements that these experiments test and that have no row, with the answers of
    docs/statements.md to those that were tested at full size."""
    tested = {answer.key for answer in answers}
    known = statements.at_full_size(statements.PAGE.read_text("utf-8"))
    return [
        f"{s.source}: {s.text}" + (f" ({known[key]})" if key in known else "")
        for key, s in statements.STATEMENTS.items()
        if s.claimed is not None and key not in tested and {*s.experiments} & {*names}
    ]


def write_statements(
    docs: Path, answers: list[report.Answer], made: dict[str, tuple[str, str]]
) -> None:
    """docs/statements.md with these answers, and those it has of statements that were not run.

    Args:
        docs: Its folder.
        answers: New ones.
        made: {experiment: its preset and the day of its run}.
    """
    runs.make_folder(docs)
    path = docs / statements.PAGE.name
    now = statements.answered(path.read_text("utf-8")) if path.exists() else {}
    for answer in answers:
        runs_of = [made[name] for name in answer.statement.experiments if name in made]
        presets, days = map(set, zip(*runs_of, strict=True))
        now[answer.key] = statements.now_text(answer, " and ".join(sorted(presets)), max(days))
    runs.write_atomically(path, statements.page(now).encode())


def page(sections: list[report.Section], preset: str, started: float, parent: Path) -> str:
    """The report: all sections under one heading, with what they were made with."""
    answers = answers_of(sections)
    over = [s.name for s in sections if s.status not in UNFINISHED]
    return report.render(
        "Rank collapse: measured and published",
        "Every experiment of this repository on the statements and figures of Dong, Cordonnier and "
        "Loukas, “Attention is not all you need: pure attention loses rank doubly exponentially "
        f"with depth” (2021), at the sizes of the preset “{preset}”.",
        sections,
        f"{len(over)} of {len(sections)} experiments have ended, after "
        f"{time.monotonic() - started:.0f} s. {machine_of(parent)}",
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


if __name__ == "__main__":
    cli.run(main, FLAGS)
