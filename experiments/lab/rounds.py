"""Runs that add draws, seeds or texts, round by round until the statements are decided.

Draw s is the same in any run: a round computes the draws that its folder does not have, and judges
the first n. So an interrupted run resumes, a larger budget continues, and no round depends on how
the earlier ones were split. The tests hold at any n (`experiments.verdicts.sequential`).
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import verdicts
from experiments.lab.flags import Flags, Mode, run_path
from experiments.lab.folder import RunFolder
from experiments.lab.progress import Progress
from experiments.lab.run import Run
from rank_collapse.printed import format_count
from rank_collapse.runs.files import damaged_file_error


class Round(NamedTuple):
    """What is known after a round.

    Attributes:
        num_draws: Draws so far.
        rows: {statement: its rows, judged}, of the statements that get an answer.
        num_joint: {statement: number of rows that are judged together}.
    """

    num_draws: int
    rows: Mapping[str, Sequence[verdicts.Judged]]
    num_joint: Mapping[str, int]

    def list_open(self) -> list[tuple[str, verdicts.Judged]]:
        """Lists (statement, row) of the rows that are not decided."""
        return [
            (key, judged)
            for key, rows in self.rows.items()
            for judged in rows
            if judged.verdict == verdicts.UNDECIDED
        ]

    def draws_left(self) -> int | None:
        """Estimates how many more draws decide all rows; None if more draws will hardly decide one.

        A row may use only some of the draws, such as the seeds in which an event occurs.
        """
        needed = [0]
        for key, judged in self.list_open():
            num_more = verdicts.seeds_to_decide(judged, self.num_joint[key])
            if num_more is None:
                return None
            needed.append(round(num_more * self.num_draws / max(1, judged.row.num_made)))
        return max(needed)


def run_until_decided(main: Callable[[Flags], Run], options: Flags) -> Run:
    """Runs an experiment with more and more draws, until its rows are decided or at the budget.

    Args:
        main: Function `main` of the experiment.
        options: Flags of the experiment.

    Returns:
        The result of `main` in the last round, which has published its results.

    Raises:
        ValueError: A number of draws together with the budget; an experiment without statements.
    """
    budget = options.counts.replace("num_", "max_")
    if options[options.counts].present:
        raise ValueError(f"--until=decided needs --{budget} instead of --{options.counts}")
    noun, arrays = options.counts.removeprefix("num_"), run_path(options) / "arrays.npz"
    previous = 0
    for num_draws in verdicts.list_rounds(verdicts.PROTOCOL.rounds, options[budget].value):
        options[options.counts].value = num_draws
        options.mode = Mode(is_judged=True)
        start, written = time.monotonic(), time_written(arrays)
        state = judge(num_draws, main(options).claims, options)
        seconds = (time.monotonic() - start) / (num_draws - previous)
        previous = num_draws
        speed = seconds if time_written(arrays) != written else None  # else it was all there
        print(describe_round(state, noun, options[budget].value, speed), file=sys.stderr)
        if not state.list_open():
            break
        options.overwrite = False  # the rounds after the first go on
    options.overwrite = False
    options.mode = Mode()
    return main(options)


def time_written(path: Path) -> float:
    """Returns when a file was last written; 0 where there is none."""
    return path.stat().st_mtime if path.exists() else 0.0


def judge(num_draws: int, rows: Sequence[verdicts.Row], options: Flags) -> Round:
    """Judges the rows of a round.

    On the registered seeds a statement is judged with all of its registered rows, some of which
    other runs measure, so that its verdict does not change when those rows are added.

    Args:
        num_draws: Draws so far.
        rows: Rows of the statements.
        options: The flags.

    Raises:
        ValueError: No row belongs to a statement that gets an answer.
    """
    is_registered = options.seed == verdicts.PROTOCOL.first_seed
    judged, num_joint = {}, {}
    for key, group in verdicts.group_rows(rows).items():
        statement = verdicts.STATEMENTS[key]
        if statement.claimed is None or statement.tests_claim:
            continue
        settings = {row.setting for row in group}
        if is_registered and settings <= {*statement.settings}:
            settings = {*statement.settings}
        num_joint[key] = len(settings)
        judged[key] = verdicts.judge_rows(group, statement, num_joint[key])
    if not judged:
        raise ValueError("--until=decided needs a statement, but these flags test none")
    return Round(num_draws, judged, num_joint)


def describe_round(state: Round, noun: str, most: int, seconds: float | None) -> str:
    """Writes "n = 64: 2 of 3 statements decided; about 60 more seeds, 2 min".

    Args:
        state: State after the round.
        noun: "seeds" or "texts".
        most: The budget.
        seconds: Time of a draw of the round; None where the folder had them all.
    """
    open_rows, count = state.list_open(), len(state.rows)
    num_decided = count - len({key for key, _ in open_rows})
    text = f"n = {state.num_draws}: {num_decided} of {count} statements decided"
    if not open_rows:
        return text
    names = ", ".join(f"{key}: {judged.row.setting}" for key, judged in open_rows[:3])
    names += ", …" * (len(open_rows) > 3)
    text += f", {format_count(len(open_rows), 'row')} open ({names})"
    num_more = state.draws_left()
    if state.num_draws == most:
        return f"{text}; open after {most} {noun}, the budget"
    if num_more is None:
        return f"{text}; a share near one half, which more {noun} will hardly decide"
    text += f"; about {num_more:,} more {noun}"
    return text if seconds is None else f"{text}, {Progress.format_interval(num_more * seconds)}"


def extend_part(
    run: RunFolder,
    part: str,
    count: int,
    compute: Callable[[int], Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Reads the first draws of a part of a run; computes and saves those that are missing.

    Args:
        run: The run folder.
        part: Arrays of one part, [draws, ...] each.
        count: Draws.
        compute: Number of the first missing draw → arrays of the draws from it on.

    Raises:
        RunError: The arrays do not have the same number of draws.
    """
    saved = run.part(part) or {}
    sizes = {len(values) for values in saved.values()} or {0}
    if len(sizes) > 1:
        raise damaged_file_error(
            run.path / "arrays.npz", f"the arrays of {part} differ in the number of draws"
        )
    (start,) = sizes
    if start < count:
        run.check_writable(part)
        new = compute(start)
        joined = {n: np.concatenate([saved[n], a]) if saved else a for n, a in new.items()}
        run.save_arrays({f"{part}/{name}": values for name, values in joined.items()})
    return {name: values[:count] for name, values in run.part(part).items()}
