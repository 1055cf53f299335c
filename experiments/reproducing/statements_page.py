"""docs/statements.md and its two tables: rows of the runs whose answers stand, and the answers.

The three are written together. A run that is given takes the place of the rows that its experiment
has in the table, and its verdicts are made anew, jointly; all other rows stay as they are. A row
whose statistic or range is no longer that of its statement is left out.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.experiment import import_experiment, list_experiments, read_run
from experiments.lab.folder import table_bytes
from experiments.lab.statements import STATEMENTS
from experiments.verdicts.claims import (
    ANSWERS,
    ERROR,
    FINDING,
    HOLDS,
    IN_PART,
    VERDICTS,
    Judged,
    Row,
    Statement,
    decide_answer,
    judge_rows,
)
from experiments.verdicts.wording import holds_text, range_text
from rank_collapse import runs
from rank_collapse.runs import files

PAGE = Path(__file__).parents[2] / "docs" / "statements.md"
ROWS, STANDING = "results/statements.csv", "results/answers.csv"  # relative to the page
EARLIER = "results/earlier.csv"
NOT_KEPT = "raw data missing"  # in the place of an answer
INTRO = """# Statements

Look up whether a claim of a paper holds. Each statement has one statistic and a range, and is
tested in several settings. A setting has an interval over independent draws: within the range,
outside, or undecided.

| answer | settings |
| --- | --- |
| holds | all are within |
| partly supported | some are within |
| not in all settings | some are outside, the others undecided |
| does not hold | all are outside |
| inconclusive | otherwise |

The lemma and the bounds allow no exception.

The intervals of a statement hold jointly (Holm). A statistic with bounds is judged by the share of
draws in a range: “in most runs” is in more than half, which is weaker than a paper that says all.
Any other is judged by its mean; its interval presumes draws that are near normal.

{counts}

Many statistics were revised after a first run. “Held-out seeds” were never used before the last
change. “{not_kept}”: a run on held-out seeds gave this answer, but rows of one experiment
are not in the files; such answers are not counted. The page and both tables are written by
`python -m experiments.statements FOLDERS` from run folders, and from the tables where none is
given. Files: [answers]({answers}), [rows with intervals and the command of their run]({rows}),
[earlier verdicts](results/statements_history.csv) with reasons for changes,
[commands for held-out seeds](results/new_seeds.txt).
"""
EARLIER_INTRO = f"""
## Earlier results

Of experiments that are no longer part of the package; their code is in the history of the
repository, commit 7d44237. Files: [answers by setting]({EARLIER}),
[rows with intervals](results/earlier_rows.csv).

| date | answer | statement and test |
| --- | --- | --- |
"""
OTHERS, FEW = "Other papers", 3  # papers with fewer statements share a table
TableRows = Sequence[Mapping[str, Any]]
Answers = Mapping[str, Mapping[str, str]]  # {statement: its row of `STANDING`}


def write_page(docs: Path, folders: Iterable[Path] = ()) -> None:
    """Writes the page and its tables, from the tables of `docs` and from run folders.

    Args:
        docs: The folder of the page.
        folders: Runs whose rows replace those of their experiments.

    Raises:
        RunError: A folder that is no complete run.
    """
    new = [row for folder in folders for row in read_run_rows(folder)]
    rows = merge_rows(read_current_rows(docs / ROWS), new)
    answers = answer_rows(rows)
    runs.make_folder((docs / ROWS).parent)
    for path, content in (
        (ROWS, table_bytes(rows)),
        (STANDING, table_bytes(answers.values())),
        (PAGE.name, render_page(answers).encode()),
    ):
        runs.write_atomically(docs / path, content)


def read_current_rows(path: Path) -> TableRows:
    """Reads the rows of a table whose statistic and range are still those of their statement."""
    return [row for row in _read_table(path) if is_current(row)]


def is_current(row: Mapping[str, str]) -> bool:
    """Returns whether a row tests what its statement says today."""
    statement = STATEMENTS.get(row["statement"])
    today = statement and (statement.statistic, holds_text(statement))
    return today == (row["statistic"], row["range"])


def read_run_rows(folder: Path) -> list[tuple[Row, dict[str, Any]]]:
    """Reads the rows of a run, each with the columns that say which run it is of."""
    saved = files.read_object(folder / "config.json")
    flags, words = saved["config"], saved["execution"]["command"].split()
    names = {import_experiment(n).FLAGS.experiment: n for n in list_experiments()}
    name = names[flags["experiment"]]
    run = {
        "experiment": name,
        "date": saved["environment"]["started"][:10],
        "seed": flags.get("seed", 0),
        "command": " ".join(w for w in words if not w.startswith(("--output_dir", "--run_name"))),
    }
    return [(row, run) for row in read_run(import_experiment(name), folder).claims]


def merge_rows(rows: TableRows, new: Sequence[tuple[Row, Mapping[str, Any]]]) -> TableRows:
    """Replaces rows of the table by those of new runs of the same experiments.

    The new rows of a statement are judged together. Its other rows count for the level of their
    intervals, and keep their verdicts.

    Args:
        rows: Of the table.
        new: From `read_run_rows`.

    Returns:
        Rows of the table, in the order of the statements and of their experiments.
    """
    replaced = {(row.key, run["experiment"]) for row, run in new}
    remaining = [row for row in rows if (row["statement"], row["experiment"]) not in replaced]
    merged: list[Mapping[str, Any]] = []
    for key, statement in STATEMENTS.items():
        old_rows = [row for row in remaining if row["statement"] == key]
        new_rows = [(row, run) for row, run in new if row.key == key]
        judged = judge_rows([row for row, _ in new_rows], statement.claimed, len(old_rows))
        table = [
            _table_row(statement, j, run) for j, (_, run) in zip(judged, new_rows, strict=True)
        ]
        order = [*statement.experiments].index
        merged += sorted([*old_rows, *table], key=lambda row: order(row["experiment"]))
    return merged


def _table_row(statement: Statement, judged: Judged, run: Mapping[str, Any]) -> dict[str, Any]:
    low, high = judged.interval if judged.interval.is_finite else (None, None)
    return {
        "statement": judged.row.key,
        "setting": judged.row.setting,
        "verdict": judged.verdict if statement.claimed else "",
        "estimate": judged.row.estimate,
        "low": low,
        "high": high,
        "draws": judged.row.draws,
        "note": judged.row.note,
        "statistic": statement.statistic,
        "range": holds_text(statement),
        **run,
    }


def answer_rows(rows: TableRows) -> dict[str, dict[str, str]]:
    """Answers the statements that have rows, or a run on held-out seeds.

    Args:
        rows: Of the table.

    Returns:
        {statement: its row of `STANDING`}.
    """
    answers = {}
    for key, statement in STATEMENTS.items():
        tests = [row for row in rows if row["statement"] == key]
        if not tests and not statement.confirmed:
            continue
        settings = {
            verdict: ", ".join(r["setting"] for r in tests if r["verdict"] == verdict)
            for verdict in VERDICTS
            if statement.claimed
        }
        complete = {row["experiment"] for row in tests} == {*statement.experiments}
        answer = decide_answer(statement, [row["verdict"] for row in tests])
        answers[key] = {
            "statement": key,
            "answer": answer if complete else NOT_KEPT,
            "rows": str(len(tests)),
            "runs": "; ".join(
                sorted({f"{r['experiment']} {r['date']}, seed {r['seed']}" for r in tests})
            ),
            "where": "; ".join(f"{v}: {names}" for v, names in settings.items() if names),
            "held-out seeds": statement.confirmed,
        }
    return answers


def read_answers(page: Path = PAGE) -> Answers:
    """Reads the table of answers of a page; none where there is no table."""
    return {row["statement"]: row for row in _read_table(page.parent / STANDING)}


def _read_table(path):
    if not path.exists():
        return []
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8"))))


def full_size_answers(answers: Answers) -> dict[str, str]:
    """Writes {key: "docs/statements.md has: holds"} of the statements that have an answer there."""
    return {
        key: f"docs/statements.md has: {row['answer']}"
        for key, row in answers.items()
        if row["answer"] not in (FINDING, NOT_KEPT)
    }


def count_sentence(answers: Answers) -> str:
    """Writes "24 statements have 90 rows: holds 20, … At most 1.2 … by chance."."""
    tested = [row for row in answers.values() if row["answer"] in ANSWERS]
    counts = Counter(row["answer"] for row in tested)
    count_text = ", ".join(f"{answer} {counts[answer]}" for answer in ANSWERS if counts[answer])
    num_missing = sum(row["answer"] == NOT_KEPT for row in answers.values())
    return (
        f"{len(tested)} statements have {sum(int(row['rows']) for row in tested)} rows: "
        f"{count_text}. At most {ERROR * len(tested):.1f} of these answers are expected to be "
        f"wrong by chance. Of {num_missing} further statements the rows were not kept."
    )


def render_page(answers: Answers) -> str:
    """Renders docs/statements.md with these answers; statements without one were not run."""
    counts = count_sentence(answers)
    parts = [INTRO.format(counts=counts, not_kept=NOT_KEPT, answers=STANDING, rows=ROWS)]
    num_statements = Counter(split_source(statement)[0] for statement in STATEMENTS.values())
    tables: dict[str, list[str]] = {}
    for key, statement in STATEMENTS.items():
        paper, place = split_source(statement)
        if num_statements[paper] < FEW:
            paper, place = OTHERS, statement.source
        line = _render_line(key, statement, place, answers.get(key))
        tables.setdefault(paper, []).append(line)
    head = "| answer | statement and test |\n| --- | --- |\n"
    parts += [f"\n## {paper}\n\n{head}{''.join(lines)}" for paper, lines in tables.items()]
    return "".join(parts) + render_earlier()


def render_earlier() -> str:
    """Renders the table of results of experiments that no longer exist."""
    lines = []
    for row in _read_table(PAGE.parent / EARLIER):
        test = row["statistic"] + f"; range: {row['range']}" * bool(row["range"])
        text = f"**{row['statement']}** ({row['source']}): {_escape(row['text'])}"
        answer = f"**{row['answer']}**<br>{row['where']}"
        lines.append(f"| {row['date']} | {answer} | {text}<br>*{_escape(test)}* |\n")
    return EARLIER_INTRO + "".join(lines) if lines else ""


def split_source(statement: Statement) -> tuple[str, str]:
    """Splits a statement's source into paper and place: ("Dong et al. 2021", "section 3.1")."""
    if statement.claimed is None:
        return "Findings, which no paper states", ""
    paper, _, place = statement.source.partition(", ")
    return paper, place


def _render_line(key, statement, place, row):
    """Renders one statement with its row of `STANDING`, or None, as a line of a table.

    Args:
        key: Of the statement.
        statement: The statement.
        place: In the paper.
        row: Of `STANDING`; None where it was not run.
    """
    answer, test = row["answer"] if row else "not run", statement.statistic
    cell = f"**{answer}**"
    if statement.claimed is not None:
        test += f"; range: {range_text(statement.draw_range or statement.claimed)}"
        if statement.draw_range is not None and answer in (HOLDS, IN_PART):
            cell += ", in most runs"
    if statement.confirmed:
        run, _, confirmed = statement.confirmed.partition(": ")
        of_texts = run.endswith("texts")  # trained weights: other texts are new draws
        draws, seed = "held-out texts" if of_texts else "held-out seeds", run.rpartition(" ")[2]
        table_runs = row["runs"].split("; ") if row and row["runs"] else []
        are_new = all(of_texts or text.endswith(f"seed {seed}") for text in table_runs)
        reason = f", {run[:10]}" if answer == NOT_KEPT else ", raw data missing"
        in_table = table_runs and are_new and answer != NOT_KEPT
        tested = f"on {draws}" if in_table else f"{draws}: {confirmed}{reason}"
        cell += f"<br>{tested}"
    source = f" ({place})" * bool(place)
    text = f"**{key}**{source}: {_escape(statement.text)}<br>*{_escape(test)}*"
    return f"| {cell} | {text} |\n"


def _escape(text):
    return text.replace("|", r"\|").replace("*", r"\*")
