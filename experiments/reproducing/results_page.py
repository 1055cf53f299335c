"""Every page with results, from the folders of one run of `reproduce`.

docs/results.md with figures and tables, docs/statements.md, and the paragraph and table of results
on docs/experiments/NAME.md.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from experiments.lab import JsonObject, list_experiments, provenance, table_bytes
from experiments.reproducing import statements_page
from experiments.reproducing.filling import (
    Texts,
    fill,
    find_missing,
    read_numbers,
    read_settings,
    read_texts,
    write_numbers,
)
from experiments.reproducing.markdown import render_markdown
from experiments.reproducing.sections import (
    CAME_OUT,
    RunRecord,
    list_runs,
    make_section,
    read_flag_values,
    read_times,
)
from rank_collapse import runs
from rank_collapse.runs import files

INTRO = (
    "This page shows the results of all experiments, from one run of the code. A CSV file in each "
    "section has all its numbers. The page on [statements](statements.md) says which claims of the "
    "papers hold. `python -m experiments.reproduce --preset={preset} --markdown` measures "
    "everything and writes this page. Another [CSV file](results/runs.csv) lists commands, commits "
    "and seconds."
)
RUNS = "results/runs.csv"  # relative to the page
TABLE = re.compile(r"(?<=<!-- filled -->\n).*?(?=<!-- end -->)", re.DOTALL)


def write_markdown(parent: Path, preset: str, docs: Path) -> Path:
    """Writes all pages with results from the complete runs of a preset.

    For each experiment the numbers of its runs fill the places of its texts (results.toml). With
    the preset "reported" each number that a text names must exist, and the experiments' own pages
    are written, too. Pictures of earlier runs are removed.

    Args:
        parent: Folder that holds the run folders.
        preset: Preset of the sizes of the runs.
        docs: Folder for results.md, results/ and statements.md; it has experiments/.

    Returns:
        The path of results.md.

    Raises:
        ValueError: A text names a number that its experiment's table does not have.
        RunError: A damaged folder.
    """
    texts = read_texts()
    names = [name for name in list_experiments() if is_complete(name, preset, parent)]
    table, sections, pages, missing_numbers = [], [], {}, []
    for name in names:
        records = []
        for run in list_runs(name, preset):
            row = {"run": run, **describe_run(parent, run)}
            table.append(row)
            label = run.partition("/")[2]
            records.append(RunRecord(parent / run, row["command"], format_run(row, preset), label))
        section = make_section(name, records)
        numbers = read_numbers(write_numbers(section.comparisons, section.claims))
        numbers = {**numbers, **read_settings(read_flag_values(name, preset))}
        wanted = find_missing(texts[name].result + texts[name].table, numbers)
        missing_numbers += [f"{name}: {placeholder}" for placeholder in wanted]
        filled = Texts(*(fill(text, numbers).strip() for text in texts[name][:2]))
        pages[f"experiments/{name}.md"] = filled
        came_out = "\n\n".join(filter(None, filled[:2])).replace("](../", "](")
        sections.append(replace(section, came_out=came_out))
    if missing_numbers and preset == "reported":
        raise ValueError(f"results.toml names rows that no table has: {'; '.join(missing_numbers)}")
    statements_page.write_page(docs, [parent / row["run"] for row in table])
    missing = [name for name in list_experiments() if name not in names]
    intro = INTRO.format(preset=preset) + (f" Not run: {', '.join(missing)}." if missing else "")
    text, contents = render_markdown("Results", intro, sections)
    contents |= {"results.md": text.encode(), RUNS: table_bytes(table)}
    if preset == "reported":
        contents |= fill_pages(docs, pages)
    for path, content in contents.items():
        runs.make_folder((docs / path).parent)
        runs.write_atomically(docs / path, content)
    for name in names:
        for path in (docs / "results").glob(f"{name}_*.png"):
            if f"results/{path.name}" not in contents:  # of an earlier run
                path.unlink()
    return docs / "results.md"


def fill_pages(docs: Path, pages: Mapping[str, Texts]) -> dict[str, bytes]:
    """Writes results into the existing pages of experiments.

    Args:
        docs: The folder of the pages.
        pages: {path: filled texts}.

    Returns:
        {path: the page}.
    """
    contents = {}
    for path, filled in pages.items():
        if (docs / path).exists():
            page = (docs / path).read_text("utf-8")
            contents[path] = fill_page(page, filled).encode()
    return contents


def fill_page(page: str, filled: Texts) -> str:
    """Replaces the paragraph and the table of results of one page.

    Args:
        page: Page with "**Result.** …", and with "<!-- filled -->" where it has a table.
        filled: New paragraph and table.
    """
    page = CAME_OUT.sub(lambda _: f"**Result.** {filled.result}", page, count=1)
    return TABLE.sub(lambda _: f"{filled.table}\n", page, count=1)


def is_complete(name: str, preset: str, parent: Path) -> bool:
    """Returns whether all runs of an experiment have a summary.

    Args:
        name: Name of the experiment.
        preset: Preset of the sizes.
        parent: Folder that holds its run folders.
    """
    return all((parent / run / "summary.json").exists() for run in list_runs(name, preset))


def describe_run(parent: Path, name: str) -> JsonObject:
    """Reads date, seed, time, machine, version, commit and command of a run.

    Args:
        parent: Folder that holds the run folders.
        name: The run, see `list_runs`.

    Raises:
        RunError: A damaged config.json.
    """
    path, times = parent / name / "config.json", read_times(parent).get(name, {})
    saved = files.read_object(path)
    try:
        environment = saved["environment"]
        device = environment["device"]
        if environment["backend"] == "cpu":
            device = environment.get("processor", "CPU")
        return {
            "date": environment["started"][:10],
            "seed": saved["config"].get("seed"),
            "seconds": times.get("seconds"),
            "cpu_seconds": times.get("cpu_seconds"),
            "at_least": bool(times.get("at_least", True)),
            "jobs": times.get("jobs"),
            "machine": f"{environment['num_devices']} × {device}",
            "jax": provenance.list_versions(saved, "jax"),
            "commit": provenance.list_commits(saved),
            "command": saved["execution"]["command"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise files.damaged_file_error(path, f"no entry {error}") from error


def format_run(run: JsonObject, preset: str) -> str:
    """Writes what `describe_run` reads as the small print of a section."""
    seed = "" if run["seed"] is None else f", seed {run['seed']}"
    seconds = ""
    if run["seconds"] is not None:
        bound = "at least " if run["at_least"] else ""
        another = ", while another experiment ran" if run["jobs"] > 1 else ""
        seconds = f", {bound}{run['seconds']:.0f} s, compilation included{another}"
    return (
        f"{run['date']}{seed}{seconds}, on {run['machine']}; sizes “{preset}”, JAX {run['jax']}, "
        f"commit {run['commit'] or 'unknown'}."
    )
