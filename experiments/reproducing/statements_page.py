"""docs/statements.md: every statement with its test and its answers, and the table of answers."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.lab.statements import STATEMENTS
from rank_collapse import runs
from rank_collapse.report.claims import ERROR, FINDING, Answer, Statement
from rank_collapse.report.markdown import table_of
from rank_collapse.report.wording import range_text

PAGE = Path(__file__).parents[2] / "docs" / "statements.md"
ANSWERS = "results/answers.csv"  # relative to the page
EARLIER = "results/earlier.csv"
COLUMNS = ("statement", "answer", "sizes", "date", "where")
INTRO = """# Statements

Each statement has one statistic and a range. It is tested in several settings. A setting has an
interval over independent draws, which is within the range, outside, or undecided. The statement
holds where all settings are within, and holds in part where some are. It does not hold where all
are outside. Otherwise it cannot be said. The lemma and the bounds allow no exception.

The intervals of a statement hold jointly (Holm). Chance alone gives it a wrong verdict in at most
{percent:g} % of runs: {number:.1f} statements of all, on average. A statistic with bounds is judged
by the share of draws in a range: “in most draws” is in more than half. Any other is judged by its
mean; its interval presumes draws that are near normal.

Many statistics were revised after a first run. The answer of a later run at full size on new seeds,
which were never used before, stands: “confirmed” where it is the same. Files:
[answers by setting]({answers}), [rows with intervals](results/statements.csv) of
[the results](results.md), [earlier verdicts](results/statements_history.csv) with reasons for
changes, [commands for new seeds](results/new_seeds.txt).
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
Known = Mapping[str, Mapping[str, str]]  # {statement: its row of `ANSWERS`}


def write(docs: Path, answers: Sequence[Answer], made: Mapping[str, tuple[str, str]]) -> None:
    """The page with these answers, and those it has of statements that were not run.

    Args:
        docs: Its folder.
        answers: New ones.
        made: {experiment: the sizes and the day of its run}.
    """
    known = dict(known_answers(docs / PAGE.name))
    for answer in answers:
        runs_of = [made[name] for name in answer.statement.experiments if name in made]
        sizes, days = map(set, zip(*runs_of, strict=True))
        known[answer.key] = answered(answer, " and ".join(sorted(sizes)), max(days))
    rows = [known[key] for key in STATEMENTS if key in known]
    runs.make_folder((docs / ANSWERS).parent)
    runs.write_atomically(docs / ANSWERS, table_of(rows))
    runs.write_atomically(docs / PAGE.name, page(known).encode())


def known_answers(path: Path = PAGE) -> Known:
    """The answers beside a page; none where there is no table of them."""
    return _rows_of(path.parent / ANSWERS)


def _rows_of(table):
    if not table.exists():
        return {}
    rows = csv.DictReader(io.StringIO(table.read_text("utf-8")))
    return {row["statement"]: row for row in rows}


def answered(answer: Answer, sizes: str, day: str) -> dict[str, str]:
    """The row of `ANSWERS` of a statement, from runs of these sizes and of this day."""
    where = f"{len(answer.rows)} rows" if answer.answer == FINDING else answer.where
    return dict(zip(COLUMNS, (answer.key, answer.answer, sizes, day, where), strict=True))


def at_full_size(known: Known) -> dict[str, str]:
    """{key: "at full size, 2026-11-23: holds"} of the statements that were run so."""
    found = {}
    for key, row in known.items():
        if row["sizes"] == "paper" and row["answer"] != FINDING:
            changed = STATEMENTS[key].changed[:10] > row["date"]
            before = ", before its test changed" if changed else ""
            found[key] = f"at full size, {row['date']}{before}: {row['answer']}"
    return found


def page(known: Known) -> str:
    """docs/statements.md with these answers; other statements were not run."""
    tested = sum(s.claimed is not None for s in STATEMENTS.values())
    parts = [INTRO.format(percent=100 * ERROR, number=ERROR * tested, answers=ANSWERS)]
    papers = Counter(paper_of(own)[0] for own in STATEMENTS.values())
    tables: dict[str, list[str]] = {}
    for key, own in STATEMENTS.items():
        paper, place = paper_of(own)
        if papers[paper] < FEW:
            paper, place = OTHERS, own.source
        tables.setdefault(paper, []).append(_row(key, own, place, known.get(key)))
    head = "| answer | statement and test |\n| --- | --- |\n"
    parts += [f"\n## {paper}\n\n{head}{''.join(rows)}" for paper, rows in tables.items()]
    return "".join(parts) + earlier()


def earlier() -> str:
    """The table of what was found by experiments that are gone."""
    rows = _rows_of(PAGE.parent / EARLIER).values()
    lines = []
    for row in rows:
        test = row["statistic"] + f"; range: {row['range']}" * bool(row["range"])
        text = f"**{row['statement']}** ({row['source']}): {_escaped(row['text'])}"
        answer = f"**{row['answer']}**<br>{row['where']}"
        lines.append(f"| {row['date']} | {answer} | {text}<br>*{_escaped(test)}* |\n")
    return EARLIER_INTRO + "".join(lines)


def paper_of(own: Statement) -> tuple[str, str]:
    """("Dong et al. 2021", "section 3.1") of a statement's source."""
    if own.claimed is None:
        return "Findings, which no paper states", ""
    paper, _, place = own.source.partition(", ")
    return paper, place


def _row(key, own, place, row):
    answer, test = row["answer"] if row else "not run", own.statistic
    stands = ""
    if own.claimed is not None:
        confirmed = own.confirmed.partition(": ")[2]
        stands = f"<br>new seeds: {confirmed}" if confirmed else "<br>not confirmed"
        stands = "<br>confirmed" if confirmed == answer else stands
        most = " in most draws" * (own.each is not None)
        test += f"; range: {range_text(own.each or own.claimed)}{most}"
    where = f" ({place})" * bool(place)
    text = f"**{key}**{where}: {_escaped(own.text)}<br>*{_escaped(test)}*"
    return f"| **{answer}**{stands} | {text} |\n"


def _escaped(text):
    return text.replace("|", r"\|").replace("*", r"\*")
