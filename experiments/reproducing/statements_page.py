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

from experiments.lab.experiment import experiments_of, module_of, read
from experiments.lab.statements import STATEMENTS
from experiments.reproducing.markdown import table_of
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
    answer_from,
    judged,
)
from experiments.verdicts.wording import holds_text, range_text
from rank_collapse import runs
from rank_collapse.runs import files

PAGE = Path(__file__).parents[2] / "docs" / "statements.md"
ROWS, STANDING = "results/statements.csv", "results/answers.csv"  # relative to the page
EARLIER = "results/earlier.csv"
NOT_KEPT = "rows not kept"  # in the place of an answer
INTRO = """# Statements

Each statement has one statistic and a range. It is tested in several settings. A setting has an
interval over independent draws, which is within the range, outside, or undecided. The statement
holds where all settings are within, and holds in part where some are. It does not hold where all
are outside, and not in all settings where some are outside and the others undecided. Otherwise it
cannot be said. The lemma and the bounds allow no exception.

The intervals of a statement hold jointly (Holm). A statistic with bounds is judged by the share of
draws in a range: “in most draws” is in more than half, which is weaker than a paper that says all.
Any other is judged by its mean; its interval presumes draws that are near normal.

{counts}

Many statistics were revised after a first run. “New seeds” were never used before the last change.
“{not_kept}”: a run on new seeds gave this answer, but rows of one of its experiments are not among
the files; such answers are not counted. The page and both tables are written by
`python -m experiments.statements FOLDERS` from run folders, and from the tables where none is
given. Files: [answers]({answers}), [rows with intervals and the command of their run]({rows}),
[earlier verdicts](results/statements_history.csv) with reasons for changes,
[commands for new seeds](results/new_seeds.txt).
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
Rows = Sequence[Mapping[str, Any]]
Known = Mapping[str, Mapping[str, str]]  # {statement: its row of `STANDING`}


def write(docs: Path, folders: Iterable[Path] = ()) -> None:
    """The page and its tables, from the tables that there are and from run folders.

    Args:
        docs: The folder of the page.

    Raises:
        RunError: A folder that is no whole run.
    """
    rows = standing(kept(docs / ROWS), [found for folder in folders for found in rows_of(folder)])
    known = answers(rows)
    runs.make_folder((docs / ROWS).parent)
    for path, content in (
        (ROWS, table_of(rows)),
        (STANDING, table_of(list(known.values()))),
        (PAGE.name, page(known).encode()),
    ):
        runs.write_atomically(docs / path, content)


def kept(table: Path) -> Rows:
    """The rows of a table whose statistic and range are still those of their statement."""
    return [row for row in _read(table) if current(row)]


def current(row: Mapping[str, str]) -> bool:
    """Whether a row tests what its statement says today."""
    own = STATEMENTS.get(row["statement"])
    return own is not None and (row["statistic"], row["range"]) == (own.statistic, holds_text(own))


def rows_of(folder: Path) -> list[tuple[Row, dict[str, Any]]]:
    """What a run found, each row with the run that it is of."""
    config = files.read_object(folder / "config.json")
    flags, made = config["config"], config["environment"]
    named = {module_of(n).FLAGS.experiment: n for n in experiments_of()}
    name, words = named[flags["experiment"]], config["execution"]["command"].split()
    run = {
        "experiment": name,
        "date": made["started"][:10],
        "seed": flags.get("seed", 0),
        "command": " ".join(w for w in words if not w.startswith(("--output_dir", "--run_name"))),
    }
    return [(row, run) for row in read(module_of(name), folder).claims]


def standing(known: Rows, found: Sequence[tuple[Row, Mapping[str, Any]]]) -> Rows:
    """All rows: those of new runs in the place of what their experiments had."""
    new = {(row.key, run["experiment"]) for row, run in found}
    left = [row for row in known if (row["statement"], row["experiment"]) not in new]
    rows: list[Mapping[str, Any]] = []
    for key, statement in STATEMENTS.items():
        beside = [row for row in left if row["statement"] == key]
        own = [(row, run) for row, run in found if row.key == key]
        verdicts = judged([row for row, _ in own], statement.claimed, len(beside))
        made = [_row(statement, j, run) for j, (_, run) in zip(verdicts, own, strict=True)]
        places = {name: place for place, name in enumerate(statement.experiments)}
        rows += sorted([*beside, *made], key=lambda row: places[row["experiment"]])
    return rows


def _row(statement: Statement, found: Judged, run: Mapping[str, Any]) -> dict[str, Any]:
    low, high = found.interval if found.interval.is_finite else (None, None)
    return {
        "statement": found.row.key,
        "setting": found.row.setting,
        "verdict": found.verdict if statement.claimed else "",
        "estimate": found.row.estimate,
        "low": low,
        "high": high,
        "draws": found.row.draws,
        "note": found.row.why,
        "statistic": statement.statistic,
        "range": holds_text(statement),
        **run,
    }


def answers(rows: Rows) -> dict[str, dict[str, str]]:
    """{statement: its row of `STANDING`}, of all that have rows or a run on new seeds."""
    found = {}
    for key, statement in STATEMENTS.items():
        own = [row for row in rows if row["statement"] == key]
        if not own and not statement.confirmed:
            continue
        settings = {
            v: [row["setting"] for row in own if statement.claimed and row["verdict"] == v]
            for v in VERDICTS
        }
        where = "; ".join(f"{v}: {', '.join(names)}" for v, names in settings.items() if names)
        made = sorted({f"{row['experiment']} {row['date']}, seed {row['seed']}" for row in own})
        whole = {row["experiment"] for row in own} == {*statement.experiments}
        found[key] = {
            "statement": key,
            "answer": answer_from(statement, {r["verdict"] for r in own}) if whole else NOT_KEPT,
            "rows": str(len(own)),
            "runs": "; ".join(made),
            "where": where,
            "new seeds": statement.confirmed,
        }
    return found


def known_answers(path: Path = PAGE) -> Known:
    """The answers beside a page; none where there is no table of them."""
    return {row["statement"]: row for row in _read(path.parent / STANDING)}


def _read(table):
    if not table.exists():
        return []
    return list(csv.DictReader(io.StringIO(table.read_text("utf-8"))))


def at_full_size(known: Known) -> dict[str, str]:
    """{key: "docs/statements.md has: holds"} of the statements that have an answer there."""
    return {
        key: f"docs/statements.md has: {row['answer']}"
        for key, row in known.items()
        if row["answer"] not in (FINDING, NOT_KEPT)
    }


def counts(known: Known) -> str:
    """ "24 statements have 90 rows here: holds 20, … At most 1.2 … by chance."."""
    tested = [row for row in known.values() if row["answer"] in ANSWERS]
    number = Counter(row["answer"] for row in tested)
    named = ", ".join(f"{answer} {number[answer]}" for answer in ANSWERS if number[answer])
    lost = sum(row["answer"] == NOT_KEPT for row in known.values())
    return (
        f"{len(tested)} statements have {sum(int(row['rows']) for row in tested)} rows: {named}. "
        f"At most {ERROR * len(tested):.1f} of these answers are expected to be wrong by chance. "
        f"Of {lost} further statements the rows were not kept."
    )


def page(known: Known) -> str:
    """docs/statements.md with these answers; other statements were not run."""
    intro = INTRO.format(counts=counts(known), not_kept=NOT_KEPT, answers=STANDING, rows=ROWS)
    parts = [intro]
    papers = Counter(paper_of(own)[0] for own in STATEMENTS.values())
    tables: dict[str, list[str]] = {}
    for key, own in STATEMENTS.items():
        paper, place = paper_of(own)
        if papers[paper] < FEW:
            paper, place = OTHERS, own.source
        tables.setdefault(paper, []).append(_line(key, own, place, known.get(key)))
    head = "| answer | statement and test |\n| --- | --- |\n"
    parts += [f"\n## {paper}\n\n{head}{''.join(rows)}" for paper, rows in tables.items()]
    return "".join(parts) + earlier()


def earlier() -> str:
    """The table of what was found by experiments that are gone."""
    lines = []
    for row in _read(PAGE.parent / EARLIER):
        test = row["statistic"] + f"; range: {row['range']}" * bool(row["range"])
        text = f"**{row['statement']}** ({row['source']}): {_escaped(row['text'])}"
        answer = f"**{row['answer']}**<br>{row['where']}"
        lines.append(f"| {row['date']} | {answer} | {text}<br>*{_escaped(test)}* |\n")
    return EARLIER_INTRO + "".join(lines) if lines else ""


def paper_of(own: Statement) -> tuple[str, str]:
    """("Dong et al. 2021", "section 3.1") of a statement's source."""
    if own.claimed is None:
        return "Findings, which no paper states", ""
    paper, _, place = own.source.partition(", ")
    return paper, place


def _line(key, own, place, row):
    answer, test = row["answer"] if row else "not run", own.statistic
    shown = f"**{answer}**"
    if own.claimed is not None:
        test += f"; range: {range_text(own.each or own.claimed)}"
        if own.each is not None and answer in (HOLDS, IN_PART):
            shown += ", in most draws"
    if own.confirmed:
        run, _, confirmed = own.confirmed.partition(": ")
        texts = run.endswith("texts")  # of trained weights: other texts are new draws
        new, seed = "new texts" if texts else "new seeds", run.rpartition(" ")[2]
        made = row["runs"].split("; ") if row and row["runs"] else []
        same = made and all(texts or one.endswith(f"seed {seed}") for one in made)
        before = f", {run[:10]}" if answer == NOT_KEPT else ", rows not kept"
        shown += f"<br>on {new}" if same else f"<br>{new}: {confirmed}{before}"
    where = f" ({place})" * bool(place)
    text = f"**{key}**{where}: {_escaped(own.text)}<br>*{_escaped(test)}*"
    return f"| {shown} | {text} |\n"


def _escaped(text):
    return text.replace("|", r"\|").replace("*", r"\*")
