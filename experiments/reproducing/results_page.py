"""docs/results.md with its figures and numbers, and docs/statements.md, from the run folders."""

from pathlib import Path

from experiments.lab.experiment import list_experiments
from experiments.reproducing import statements_page
from experiments.reproducing.markdown import markdown
from experiments.reproducing.sections import (
    DOCS,
    PRESETS,
    Made,
    command_text,
    runs_of,
    section_of,
    times_of,
)
from rank_collapse import runs
from rank_collapse.runs import files

INTRO = (
    "What each experiment measured and what came out. All numbers are in CSV files. The answers to "
    "the papers' statements are on [their page](statements.md): {counts} This page is written by "
    "`python -m experiments.reproduce --preset=paper --markdown` from the run folders. The "
    "sizes “paper” are the published ones; “quick” is a smaller run, where that one was not done."
)


def write_markdown(folder: Path, docs: Path) -> Path:
    """docs/results.md with its files, of every experiment at the largest preset that is done; rows
    of the published sizes stand on docs/statements.md."""
    sections, missing, full = [], [], []
    for name in list_experiments():
        done = [p for p in reversed(PRESETS) if is_done(name, p, folder / p)]
        if not done:
            missing.append(name)
            continue
        preset, parent, found = done[0], folder / done[0], []
        for run, arguments in runs_of(name, preset).items():
            where, details = parent / run, made_with(parent, run, preset)
            command = command_of(where, command_text(run, arguments, where))
            found.append(Made(where, command, details, run.partition("/")[2]))
        full += [made.folder for made in found if preset == "paper"]
        sections.append(section_of(name, found))
    statements_page.write(docs, full)
    text, made = markdown(
        "Results",
        intro(docs) + (f" Not run: {', '.join(missing)}." if missing else ""),
        sections,
    )
    for path, content in (made | {"results.md": text.encode()}).items():
        runs.make_folder((docs / path).parent)
        runs.write_atomically(docs / path, content)
    return docs / "results.md"


def intro(docs: Path = DOCS) -> str:
    """The first paragraph, with the counts of the answers that stand."""
    known = statements_page.known_answers(docs / statements_page.PAGE.name)
    return INTRO.format(counts=statements_page.counts(known))


def is_done(name: str, preset: str, parent: Path) -> bool:
    """Whether all runs of an experiment have a summary."""
    return all((parent / run / "summary.json").exists() for run in runs_of(name, preset))


def command_of(folder: Path, otherwise: str) -> str:
    """The command that made a run, which may have had more seeds than its preset."""
    made = files.read_object(folder / "config.json").get("execution")
    command = made.get("command") if isinstance(made, dict) else None
    return command if isinstance(command, str) else otherwise


def made_with(parent: Path, name: str, preset: str) -> str:
    """A run's date, seed, time, machine, sizes and versions.

    Raises:
        RunError: A damaged config.json.
    """
    took = times_of(parent).get(name)
    time_of = "time not kept"
    if took is not None:
        beside = ", another experiment beside it" if took["jobs"] > 1 else ""
        time_of = f"{took['seconds']:.0f} s, compilation included{beside}"
    path = parent / name / "config.json"
    config = files.read_object(path)
    try:
        made, flags = config["environment"], config["config"]
        seed = f"seed {flags['seed']}, " if "seed" in flags else ""
        machine = made["device"] if made["backend"] != "cpu" else made.get("processor", "CPU")
        return (
            f"{made['started'][:10]}, {seed}{time_of}, on {made['num_devices']} × {machine}; "
            f"sizes “{preset}”, JAX {made['versions']['jax']}, git {(made['git'] or '')[:10]}."
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise files.damaged(path, f"no entry {error}") from error
