"""docs/statements.md and its table of rows: the results of one set of run folders for each
statement.

Answers follow from the verdicts in the table. Without folders, `write_page` writes the page again
from the table.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments.lab import (
    import_experiment,
    list_experiments,
    provenance,
    read_rows,
    read_run,
    table_bytes,
)
from experiments.verdicts import (
    ANSWERS,
    ERROR,
    PROTOCOL,
    STATEMENTS,
    UNDECIDED,
    Row,
    TableRow,
    decide_answer,
    judge_rows,
    refuting_text,
    verdict_counts,
)
from experiments.verdicts.claims import NOT_MEASURED, OPEN
from experiments.verdicts.rows import missing_row
from rank_collapse import runs
from rank_collapse.report.page import format_number
from rank_collapse.runs import files

PAGE = Path(__file__).parents[2] / "docs" / "statements.md"
ROWS = "results/statements.csv"  # relative to the page
CLEAN_COMMIT = re.compile("[0-9a-f]{40}")  # without changes: not "…-dirty"
NOT_RUN = "not run"
PAGE_TEXT = f"""# Statements

This page says which claims of papers hold. {{counts}}

A **statement** claims that a number lies in a range. The number is measured in one or more
**settings** (networks, or values of flags) and in several **draws** (seeds, or texts for trained
networks). Three counts follow each answer: settings inside the range, settings outside it, and
undecided settings. The answers are:

- **holds**: all settings are inside
- **does not hold**: all settings are outside
- **in some settings**: some are inside and some outside
- **not in all settings**: some are outside, none is inside, and the others are undecided
- **open after n**: none of the cases above, after n draws
- **not rejected**: the test can reject the statement, but cannot prove it

The last column names the number, and after the colon the values that refute the statement. “In
half” means: in at least half of the draws. Otherwise, the median decides.

N is the number of branches or loops, and L the number of layers. The *growth index* of a number is
0 if it does not grow with N, 1 if it grows like ln N, and 2 if it grows like N. The *local rate* is
the rate in one layer. [This list](results.md#terms) explains rates and other terms.

{{origin}} A [CSV file]({ROWS}) has all rows with intervals and commands, and
[related work](related.md) lists the papers.

## Statements that a run can refute

| answer | statement | draws | refuted by |
| --- | --- | --- | --- |
{{tested}}
## How statements are decided

{{protocol}}

## Statements that follow from theory

We do not count these statements. A test decides each of them; measured numbers have no range.
[Theory](theory.md) defines P̃, D, k, γ, β and Σβ².

| claim | measured | test |
| --- | --- | --- |
{{checked}}"""
PROTOCOL_TEXT = """\
A run adds draws in rounds. After the first rounds a setting has {rounds} draws. The run stops
when all settings of the statement are decided, or when a budget of draws is spent. The test is an
e-process: it accumulates evidence that the median, or more than half of the draws, is inside the
range, and evidence that it is outside. An answer is therefore wrong with a probability of at most
{error:g} %, whenever a run stops. (With the evidence E, p is 1/max E, with Holm's correction at
{side:g} % on each side.)

We fixed the numbers, ranges, settings, rounds and budgets before the run, in
`experiments/verdicts/statements.toml`. The seeds are new, from {first_seed} on. {texts}

We changed some settings and numbers after we had seen results with earlier seeds:

{changed}
"""
YEAR = re.compile(r" et al\. \d{4}")
TableRows = Sequence[TableRow]


def write_page(docs: Path, folders: Iterable[Path] = ()) -> None:
    """Writes the page and its table from run folders; without any, from the table of `docs`.

    Args:
        docs: The folder of the page.
        folders: Folders of one run of the experiments.

    Raises:
        RunError: A folder that is not a complete run.
    """
    run_rows = [pair for folder in folders for pair in read_run_rows(folder)]
    rows = list(judge_run_rows(run_rows)) if run_rows else read_table(docs / PAGE.name)
    runs.make_folder((docs / ROWS).parent)
    runs.write_atomically(docs / ROWS, table_bytes(rows))
    runs.write_atomically(docs / PAGE.name, render_page(rows).encode())


def read_run_rows(folder: Path) -> list[tuple[Row, TableRow]]:
    """Reads the rows of a run, with columns that name the run.

    Args:
        folder: Folder of the run.

    Raises:
        RunError: It is not a complete run.
    """
    saved = files.read_object(folder / "config.json")
    flags, words = saved["config"], saved["execution"]["command"].split()
    names = {import_experiment(n).FLAGS.experiment: n for n in list_experiments()}
    name = names[flags["experiment"]]
    seeds = [flags[n] for n in ("seed", "first_seed") if n in flags]
    run = {
        "experiment": name,
        "first_seed": max(seeds, default=""),  # no seed: draws are texts
        "commit": provenance.list_commits(saved),
        "command": " ".join(w for w in words if not w.startswith(("--output_dir", "--run_name"))),
    }
    return [(row, run) for row in read_run(import_experiment(name), folder).claims]


def judge_run_rows(run_rows: Sequence[tuple[Row, TableRow]]) -> Iterator[TableRow]:
    """Judges the rows of each statement jointly, and yields the rows of the table.

    Args:
        run_rows: Rows of all folders, from `read_run_rows`.
    """
    for key, statement in STATEMENTS.items():
        statement_rows = [pair for pair in run_rows if pair[0].key == key]
        if not statement_rows:
            continue
        present = {row.setting for row, _ in statement_rows}
        missing = [missing_row(key, s) for s in statement.settings if s not in present]
        statement_rows += [(row, dict.fromkeys(statement_rows[0][1], "")) for row in missing]
        judged = judge_rows([row for row, _ in statement_rows], statement)
        for verdict, (row, run) in zip(judged, statement_rows, strict=True):
            interval = verdict.interval
            log_p = (None, None) if row.evidence is None else row.evidence.log_p()
            yield {
                "statement": key,
                "setting": row.setting,
                "verdict": verdict.verdict if statement.claimed else "",
                "estimate": row.estimate,
                "low": interval.low if interval.is_finite else None,
                "high": interval.high if interval.is_finite else None,
                "draws": row.draws,
                "p_within": None if log_p[0] is None else f"{math.exp(log_p[0]):.4g}",
                "p_outside": None if log_p[1] is None else f"{math.exp(log_p[1]):.4g}",
                "note": row.note,
                **run,
            }


def read_table(page: Path = PAGE) -> TableRows:
    """Reads the table of a page; no rows where there is no table."""
    path = page.parent / ROWS
    return read_rows(path.read_bytes()) if path.exists() else []


def answer_rows(rows: TableRows) -> dict[str, str]:
    """Answers the statements that have a range: {statement: one of `ANSWERS` or "not run"}.

    A statement without the rows of all its experiments was not run.
    """
    answers = {}
    for key, statement in STATEMENTS.items():
        if statement.claimed:
            tests = [row for row in rows if row["statement"] == key]
            experiments = {row["experiment"] for row in tests} - {""}
            is_complete = experiments == {*statement.experiments}
            verdicts = [row["verdict"] for row in tests]
            answers[key] = decide_answer(statement, verdicts) if is_complete else NOT_RUN
    return answers


def count_sentence(answers: Mapping[str, str]) -> str:
    """Writes "The answers to the 28 statements are: 20 “holds”, … 2 “not run”. At most 1.3 …"."""
    counts = Counter(answers.values())
    texts = [f"{counts[answer]} “{answer}”" for answer in (*ANSWERS, NOT_RUN) if counts[answer]]
    expected = ERROR * (len(answers) - counts[NOT_RUN])
    return (
        f"The answers to the {len(answers)} statements are: {', '.join(texts)}. At most "
        f"{expected:.1f} of these answers are expected to be wrong by chance."
    )


def describe_origin(rows: TableRows) -> str:
    """Describes the run of the rows, and whether its seeds are the registered ones.

    Args:
        rows: Rows of the table.
    """
    measured = [row for row in rows if row["experiment"]]
    commits = sorted({c for row in measured for c in (row["commit"] or "unknown").split(" and ")})
    seeds = [int(row["first_seed"]) for row in measured if row["first_seed"] != ""]
    are_clean = commits and all(CLEAN_COMMIT.fullmatch(commit) for commit in commits)
    names = ", ".join(commit[:8] for commit in commits) or "none"
    if not (are_clean and seeds and min(seeds) >= PROTOCOL.first_seed):
        return (
            "The run with the registered seeds is still to come; these rows are from commits: "
            f"{names}."
        )
    if len(commits) == 1:
        return f"All rows are from one run, of commit {names}, with seeds from {min(seeds)} on."
    return f"The rows are from runs of the commits {names}, all with seeds from {min(seeds)} on."


def describe_draws(rows: TableRows) -> str:
    """Writes the number of draws of a statement's rows, "8 to 64"."""
    counts = [int(row["draws"]) for row in rows if row["verdict"] != NOT_MEASURED]
    return " to ".join(dict.fromkeys(str(end(counts)) for end in (min, max))) if counts else ""


def describe_protocol() -> str:
    """Describes how statements are decided, as registered."""
    return PROTOCOL_TEXT.format(
        rounds=", ".join(map(str, PROTOCOL.rounds)),
        first_seed=PROTOCOL.first_seed,
        texts=PROTOCOL.texts.strip(),
        error=100 * ERROR,
        side=100 * ERROR / 2,
        changed="\n".join(f"- {line}" for line in PROTOCOL.changed),
    ).strip()


def render_page(rows: TableRows) -> str:
    """Renders docs/statements.md from the rows of its table."""
    answers, tested, checked = answer_rows(rows), "", ""
    for key, statement in STATEMENTS.items():
        source = YEAR.sub("", statement.source).replace("section ", "§")
        text = f"({source}) {_escape(statement.text)}"
        if statement.claimed:
            statement_rows = [row for row in rows if row["statement"] == key]
            counts = verdict_counts([row["verdict"] for row in statement_rows])
            refuting = f"{_escape(statement.statistic)}: {refuting_text(statement)}"
            answer, draws = f"**{answers[key]}** {counts}", describe_draws(statement_rows)
            if answers[key] == NOT_RUN:
                answer, draws = f"**{NOT_RUN}**", ""
            elif answers[key] == OPEN:
                still_open = [row for row in statement_rows if row["verdict"] == UNDECIDED]
                answer = f"**{OPEN} after {describe_draws(still_open)}** {counts}"
            tested += f"| {answer} | **{key}** {text} | {draws} | {refuting} |\n"
        elif statement.test:
            statement_rows = [row for row in rows if row["statement"] == key]
            values = [
                float(row["estimate"])
                for row in statement_rows
                if row["estimate"] not in ("", None)
            ]
            bound = "at least " * any(row["note"].startswith("at least") for row in statement_rows)
            measured = f"{statement.statistic}: {bound}{range_of_values(values)}"
            if not statement.experiments:
                measured = f"{statement.statistic}: by the test alone"
            criterion = f" ({statement.criterion})" if statement.criterion else ""
            checked += f"| {text} | {measured} | `{statement.test}`{criterion} |\n"
    return PAGE_TEXT.format(
        counts=count_sentence(answers),
        origin=describe_origin(rows),
        protocol=describe_protocol(),
        tested=tested,
        checked=checked,
    )


def range_of_values(values: Sequence[float]) -> str:
    """Writes the least and the largest of values, "2.9 to 3.1"; "not run" without any."""
    ends = dict.fromkeys(format_number(end(values)) for end in (min, max)) if values else [NOT_RUN]
    return " to ".join(ends)


def _escape(text):
    return text.replace("|", r"\|").replace("*", r"\*")
