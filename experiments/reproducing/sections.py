"""What the run folders of experiments hold, as sections of a report and answers to statements."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import verdicts
from experiments.lab.experiment import (
    describe_experiment,
    figure_captions,
    import_experiment,
    read_run,
)
from experiments.lab.statements import STATEMENTS
from experiments.reproducing import statements_page
from experiments.reproducing.processes import Ended
from rank_collapse import runs
from rank_collapse.runs import files

DOCS = Path(__file__).parents[2] / "docs"
CAME_OUT = re.compile(r"^\*\*Result\.\*\* (.*)$", re.MULTILINE)
PRESETS = ("quick", "paper")


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
    """{run: its arguments} of an experiment: "run_sort", or "run_sort/name" of one of several,
    which is also its folder's place among those of the preset."""
    own = describe_experiment(name).runs(preset)
    return {f"{name}/{run}" if run else name: arguments for run, arguments in own.items()}


def command_text(run: str, arguments: Sequence[str], folder: Path) -> str:
    """The command of a run."""
    name = run.partition("/")[0]
    return f"python -m experiments.{name} {shlex.join([*arguments, f'--output_dir={folder}'])}"


def section_of(name: str, found: Sequence[Made], status: str = "done") -> verdicts.Section:
    """What the run folders of an experiment hold, as one section of the report."""
    own = describe_experiment(name)
    figures, claims, comparisons, errors = [], [], [], []
    finding, picture = "", b""
    for made in found:
        label = f"{made.label}: " if made.label else ""
        try:
            if made.code:
                raise runs.RunError(f"exit code {made.code}")
            shown = read_run(import_experiment(name), made.folder)
            drawn = {path.stem: path for path in (made.folder / "figures").glob("*.png")}
            figures += [
                (drawn[figure].read_bytes(), label + caption)
                for figure, caption in figure_captions(import_experiment(name).FIGURES).items()
                if figure in drawn  # parts of an experiment that a preset leaves out have none
            ]
            if shown.finding is not None and not finding:
                picture, finding = drawn[shown.finding.figure].read_bytes(), shown.finding.sentence
            claims += shown.claims
            comparisons += shown.comparisons
        except Exception as error:  # one broken experiment must not take the others' report with it
            errors.append(f"{label}{type(error).__name__}: {error}\n{made.printed[-2000:]}")
            print(f"{name} failed: {error}", file=sys.stderr)
    return verdicts.Section(
        name,
        own.title,
        own.claim,
        "\n".join(made.command for made in found),
        "failed" if errors else status,
        finding,
        picture,
        came_out(name) if found else "",
        figures,
        claims,
        comparisons,
        details=" ".join(f"{made.label} {made.details}".strip() for made in found),
        error="\n".join(errors),
    )


def came_out(name: str) -> str:
    """What came out of an experiment, as its page of the site has it; nothing where it has none."""
    page = DOCS / "experiments" / f"{name}.md"
    found = CAME_OUT.search(page.read_text("utf-8")) if page.exists() else None
    return found[1].replace("](../", "](") if found else ""  # links from one folder higher


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


def answers_of(sections: list[verdicts.Section]) -> list[verdicts.Answer]:
    """The answers to all statements, from the rows of all sections."""
    return verdicts.answer_statements(STATEMENTS, [r for s in sections for r in s.claims])


def untested(answers: list[verdicts.Answer], names: Sequence[str]) -> list[str]:
    """The papers' statements that these experiments test and that have no row, with the answers of
    docs/statements.md to those that were tested at full size."""
    tested = {answer.key for answer in answers}
    known = statements_page.at_full_size(statements_page.known_answers())
    return [
        f"{s.source}: {s.text}" + (f" ({known[key]})" if key in known else "")
        for key, s in STATEMENTS.items()
        if s.claimed is not None and key not in tested and {*s.experiments} & {*names}
    ]
