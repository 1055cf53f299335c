"""docs/results.md with its figures and numbers, and docs/statements.md, from the run folders."""

from pathlib import Path

from experiments.lab.experiment import list_experiments
from experiments.reproducing import statements_page
from experiments.reproducing.markdown import render_markdown
from experiments.reproducing.sections import (
    DOCS,
    PRESETS,
    RunRecord,
    list_runs,
    make_section,
    read_times,
    run_command,
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
    """Writes docs/results.md with its files, and the rows of the published sizes.

    Args:
        folder: Has a folder of runs for each preset. Each experiment is shown at the largest
            preset that is complete.
        docs: Gets results.md, results/ and statements.md.

    Returns:
        The path of results.md.
    """
    sections, missing, paper_folders = [], [], []
    for name in list_experiments():
        presets = [p for p in reversed(PRESETS) if is_complete(name, p, folder / p)]
        if not presets:
            missing.append(name)
            continue
        preset, parent, records = presets[0], folder / presets[0], []
        for run, arguments in list_runs(name, preset).items():
            path, details = parent / run, describe_run(parent, run, preset)
            command = saved_command(path) or run_command(run, arguments, path)
            records.append(RunRecord(path, command, details, run.partition("/")[2]))
        if preset == "paper":
            paper_folders += [record.folder for record in records]
        sections.append(make_section(name, records))
    statements_page.write_page(docs, paper_folders)
    intro = make_intro(docs) + (f" Not run: {', '.join(missing)}." if missing else "")
    text, contents = render_markdown("Results", intro, sections)
    for path, content in (contents | {"results.md": text.encode()}).items():
        runs.make_folder((docs / path).parent)
        runs.write_atomically(docs / path, content)
    return docs / "results.md"


def make_intro(docs: Path = DOCS) -> str:
    """Writes the first paragraph, with the counts of the answers on docs/statements.md."""
    answers = statements_page.read_answers(docs / statements_page.PAGE.name)
    return INTRO.format(counts=statements_page.count_sentence(answers))


def is_complete(name: str, preset: str, parent: Path) -> bool:
    """Returns whether all runs of an experiment have a summary.

    Args:
        name: Of the experiment.
        preset: Its sizes.
        parent: Of its run folders.
    """
    return all((parent / run / "summary.json").exists() for run in list_runs(name, preset))


def saved_command(folder: Path) -> str | None:
    """Reads the command that made a run, which may have had more seeds than its preset."""
    execution = files.read_object(folder / "config.json").get("execution")
    command = execution.get("command") if isinstance(execution, dict) else None
    return command if isinstance(command, str) else None


def describe_run(parent: Path, name: str, preset: str) -> str:
    """Describes a run: its date, seed, time, machine, sizes and versions.

    Args:
        parent: Of the run folders.
        name: The run, see `list_runs`.
        preset: Its sizes.

    Raises:
        RunError: A damaged config.json.
    """
    run_time, text = read_times(parent).get(name), "time not kept"
    if run_time is not None:
        another = ", another experiment beside it" if run_time["jobs"] > 1 else ""
        text = f"{run_time['seconds']:.0f} s, compilation included{another}"
    path = parent / name / "config.json"
    saved = files.read_object(path)
    try:
        environment, flags = saved["environment"], saved["config"]
        seed = f"seed {flags['seed']}, " if "seed" in flags else ""
        device = environment["device"]
        if environment["backend"] == "cpu":
            device = environment.get("processor", "CPU")
        return (
            f"{environment['started'][:10]}, {seed}{text}, on {environment['num_devices']} × "
            f"{device}; sizes “{preset}”, JAX {environment['versions']['jax']}, git "
            f"{(environment['git'] or '')[:10]}."
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise files.damaged_file_error(path, f"no entry {error}") from error
