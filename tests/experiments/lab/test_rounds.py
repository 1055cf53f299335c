"""Runs that add seeds or texts until the statements are decided: rounds, resuming, budgets."""

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import run_loops, run_sinks
from experiments.lab import cli, experiment, rounds
from experiments.lab.folder import RunFolder
from experiments.lab.folder_files import read_config, read_summary
from experiments.lab.progress import Stopped
from experiments.reproducing.sections import until_decided
from experiments.verdicts import PROTOCOL, STATEMENTS, make_row
from rank_collapse.runs.files import RunError, load_arrays
from tests.support.refusals import is_refused
from tests.support.runs import run

SMALL = ["--depth=8", "--gain_power=0.5,1", "--num_heads=1", "--d_model=4", "--num_tokens=4"]
UNTIL = [*SMALL, "--until=decided", "--max_seeds=32"]
LINE = re.compile(r"^n = (\d+): (\d) of 2 statements decided", re.MULTILINE)
NUMBERS = {
    "falls": lambda n: [-1.0] * n,  # within at 8 draws
    "circle": lambda n: ([-6.0, 0.0] * n)[:n],  # never decided
    "circle skip": lambda n: ([-6.0, 0.0, 0.0] * n)[:n],  # two thirds
}


def make_options(*arguments):
    return cli.parse_flags(run_loops.FLAGS, [*SMALL, *arguments])


class Drawn:
    """An experiment whose rows are the first n of fixed draws; `asked` lists the n."""

    def __init__(self, *keys):
        self.keys, self.asked, self.overwritten = keys, [], []

    def main(self, options):
        self.asked.append((options.num_seeds, options.mode.is_judged))
        self.overwritten.append(options.overwrite)
        rows = [make_row(key, "here", NUMBERS[key](options.num_seeds)) for key in self.keys]
        return SimpleNamespace(claims=rows)


@pytest.mark.parametrize(
    ("keys", "budget", "sizes"),
    [
        (["falls"], 256, [8]),
        (["falls", "circle skip"], 256, [8, 16, 32, 64, 128]),
        (["circle"], 20, [8, 16, 20]),
        (["falls"], 4, [4]),
    ],
)
def test_rounds_go_on_until_all_rows_are_decided_or_the_budget_is_spent(
    keys, budget, sizes, capsys, tmp_path
):
    drawn = Drawn(*keys)
    options = make_options("--until=decided", f"--max_seeds={budget}", f"--output_dir={tmp_path}")
    options.overwrite = True
    rounds.run_until_decided(drawn.main, options)
    assert drawn.overwritten == [True, *[False] * len(sizes)]  # the first round alone deletes
    assert drawn.asked == [(n, True) for n in sizes] + [(sizes[-1], False)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"n = {n}" for n in sizes]
    if keys == ["circle"]:
        assert "near one half" in lines[0] and lines[-1].endswith("open after 20 seeds, the budget")
        assert "0 of 1 statements decided, 1 row open (circle: here)" in lines[0]
    if "circle skip" in keys:
        assert re.search(r"1 of 2 statements decided.*about \d+ more seeds$", lines[0])


def test_what_more_seeds_cannot_do_is_refused(tmp_path):
    drawn, place = Drawn("falls"), f"--output_dir={tmp_path}"
    options = make_options("--until=decided", "--num_seeds=5", place)
    is_refused("needs --max_seeds", rounds.run_until_decided, drawn.main, options)
    options = make_options("--until=decided", place)
    is_refused("these flags test none", rounds.run_until_decided, Drawn().main, options)


def test_on_registered_seeds_rows_of_other_runs_count():
    """Eight draws decide a row alone, and not one of six."""
    (first, *_), seed = STATEMENTS["circle mlp"].settings, PROTOCOL.first_seed
    rows = [make_row("circle mlp", first, [-6.0] * 8)]
    alone = rounds.judge(8, rows, make_options("--until=decided"))
    joint = rounds.judge(8, rows, make_options("--until=decided", f"--seed={seed}"))
    assert not alone.list_open() and joint.num_joint == {"circle mlp": 6}
    assert len(joint.list_open()) == 1 and joint.draws_left() == 3
    other = rounds.judge(8, [make_row("circle mlp", "elsewhere", [-6.0] * 8)], make_options())
    assert other.num_joint == {"circle mlp": 1}
    rows = [*rows, make_row("circle mlp", "elsewhere", [-6.0] * 8)]
    other = rounds.judge(8, rows, make_options(f"--seed={seed}"))
    assert other.num_joint == {"circle mlp": 2}  # not only registered rows


def test_rows_that_are_no_draws_of_a_statement_are_not_judged():
    """Findings have no answer, and a test of what is claimed is never decided."""
    keys = ("falls", "curves", "chains")
    assert STATEMENTS["curves"].tests_claim and STATEMENTS["chains"].claimed is None
    rows = [make_row("falls", "here", [-1.0] * 8)]
    rows += [replace(rows[0], key=key) for key in keys[1:]]
    assert rounds.judge(8, rows, make_options()).num_joint == {"falls": 1}


def test_rows_that_use_some_seeds_need_more_of_all():
    """Two of eight seeds fall: of these, eight are needed."""
    rows = [make_row("circle skip", "here", [0.0, 0.0])]
    state = rounds.judge(8, rows, make_options())
    assert state.draws_left() == 6 * 8 / 2
    rows = [make_row("circle skip", "here", [0.0] * 3)]
    assert rounds.judge(8, rows, make_options()).draws_left() == 13  # 5 · 8/3
    assert rounds.judge(7, rows, make_options()).draws_left() == 12  # 5 · 7/3


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """The folder of a run until decided, and its arrays."""
    path = tmp_path_factory.mktemp("decided")
    assert run(run_loops, UNTIL, path) == 0
    return path, load_arrays(path / "arrays.npz")


def test_seeds_are_those_of_one_run_of_as_many(decided, tmp_path):
    path, arrays = decided
    count = read_summary(path)["shown"]["num_seeds"]
    assert count in (8, 16, 32) and "num_seeds" not in read_config(path)
    assert run(run_loops, [*SMALL, f"--num_seeds={count}"], tmp_path) == 0
    for name, values in load_arrays(tmp_path / "arrays.npz").items():
        np.testing.assert_allclose(arrays[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    shown = experiment.read_run(run_loops, path)
    assert {row.num_made for row in shown.claims} == {count}
    assert [row.draws for row in shown.claims] == [count] * len(shown.claims)


@pytest.mark.full
def test_a_finished_run_computes_nothing_and_a_larger_budget_goes_on(
    decided, monkeypatch, capsys, tmp_path
):
    path, _ = decided
    small = [*SMALL, "--until=decided", "--max_seeds=4"]
    assert run(run_loops, small, tmp_path) == 0
    assert read_summary(tmp_path)["shown"] == {"num_seeds": 4}
    before = (tmp_path / "figures").stat().st_mtime_ns
    assert run(run_loops, UNTIL, tmp_path) == 0
    assert (tmp_path / "figures").stat().st_mtime_ns != before
    assert (tmp_path / "results.csv").read_bytes() == (path / "results.csv").read_bytes()
    monkeypatch.setattr(RunFolder, "save_arrays", lambda *_: pytest.fail("computed again"))
    capsys.readouterr()
    assert run(run_loops, UNTIL, path) == 0
    printed = capsys.readouterr()
    assert LINE.search(printed.err) and "Wang et al." in printed.out


def test_an_interrupted_round_resumes_and_earlier_seeds_stay(decided, monkeypatch, tmp_path):
    _, expected = decided
    saves, save = [], RunFolder.save_arrays

    def save_and_stop(folder, arrays):
        save(folder, arrays)
        saves.append(folder.path)
        if len(saves) == 2:
            raise Stopped(143)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_arrays", save_and_stop)
        assert run(run_loops, [*UNTIL, "--seed_chunk=4"], tmp_path) == 143
    assert not (tmp_path / "summary.json").exists()
    begun = load_arrays(tmp_path / "arrays.npz")
    assert run(run_loops, [*UNTIL, "--seed_chunk=4"], tmp_path) == 0
    ended = load_arrays(tmp_path / "arrays.npz")
    for name, values in begun.items():
        np.testing.assert_array_equal(ended[name][: len(values)], values)
    for name, values in expected.items():
        np.testing.assert_allclose(ended[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


TEXTS = ["--untrained", "--start=0.4", "--max_tokens=8", "--how=hidden,thinned"]


@pytest.mark.full
def test_texts_are_those_of_one_run_of_as_many(tmp_path):
    until = [*TEXTS, "--until=decided", "--max_texts=12"]
    assert run(run_sinks, until, tmp_path / "rounds") == 0
    count = read_summary(tmp_path / "rounds")["shown"]["num_texts"]
    assert run(run_sinks, [*TEXTS, f"--num_texts={count}"], tmp_path / "once") == 0
    parts = [load_arrays(tmp_path / name / "arrays.npz") for name in ("rounds", "once")]
    assert parts[0].keys() == parts[1].keys()
    for name, values in parts[1].items():
        np.testing.assert_allclose(parts[0][name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def test_extended_parts_are_prefixes(tmp_path):
    asked = []

    def compute(start, count):
        asked.append((start, count))
        return {"x": np.arange(start, count)}

    with RunFolder(tmp_path, {}) as folder:
        for count in (3, 5, 2, 5):
            part = rounds.extend_part(folder, "part", count, lambda s, n=count: compute(s, n))
            assert part["x"].tolist() == [*range(count)]
    assert asked == [(0, 3), (3, 5)]


def test_reproduce_takes_the_registered_budgets():
    arguments = ["--seed=3000", "--num_seeds=7", "--compare=all"]
    budget = PROTOCOL.budgets["run_circle"]
    expected = ["--seed=3000", "--compare=all", "--until=decided", f"--max_seeds={budget}"]
    assert until_decided("run_circle", arguments) == expected
    texts = until_decided("run_sinks", ["--num_texts=7"])
    assert texts == ["--until=decided", f"--max_texts={PROTOCOL.budgets['run_sinks']}"]
    assert until_decided("run_path_counts", ["--heads=2"]) == ["--heads=2"]
    for name, most in PROTOCOL.budgets.items():
        flags = experiment.import_experiment(name).FLAGS
        assert "until" in flags and most >= 8, name
        presets = experiment.describe_experiment(name).runs("reported")
        assert all("--seed=3000" in arguments for arguments in presets.values()), name


def test_every_setting_that_is_registered_is_once():
    for key, statement in STATEMENTS.items():
        if statement.claimed is not None:
            assert statement.settings, key
            assert len({*statement.settings}) == len(statement.settings), key


def test_the_time_that_is_left_is_that_of_the_draws_of_the_last_round(
    monkeypatch, capsys, tmp_path
):
    """A round takes 3 s a draw; where the folder has the draws already, no time is said."""
    clock, drawn = [0.0], Drawn("circle skip")
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    options = make_options("--until=decided", "--max_seeds=32", f"--output_dir={tmp_path}")
    options.overwrite = True
    overwritten, counts = [], [0]

    def main(options):
        overwritten.append(options.overwrite)
        clock[0] += 3.0 * (options.num_seeds - counts[-1])
        counts.append(options.num_seeds)
        if options.num_seeds != 8:  # of which the folder has the arrays
            path = rounds.run_path(options) / "arrays.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            os.utime(path, (options.num_seeds, options.num_seeds))
        return drawn.main(options)

    rounds.run_until_decided(main, options)
    lines = capsys.readouterr().err.splitlines()
    assert counts == [0, 8, 16, 32, 32] and overwritten == [True, False, False, False]
    needed = [re.search(r"about ([\d,]+) more seeds(?:, (.*))?$", line) for line in lines]
    (_, unknown), (count, interval) = (match.groups() for match in needed[:2])
    minutes, seconds = divmod(3 * int(count), 60)
    assert interval == f"{minutes:02d}:{seconds:02d}" and unknown is None
    assert lines[2].endswith("open after 32 seeds, the budget")


def test_rows_that_are_open_are_named_three_at_most():
    settings = [f"setting {i}" for i in range(5)]
    for count in (1, 3, 5):
        rows = [make_row("circle", name, [-6.0, 0.0] * 4) for name in settings[:count]]
        state = rounds.judge(8, rows, make_options())
        line = rounds.describe_round(state, "texts", 64, 2.0)
        names = ", ".join(f"circle: {name}" for name in settings[: min(count, 3)])
        ends = ", …" if count > 3 else ""
        opened = f"{count} row{'s' if count > 1 else ''} open ({names}{ends})"
        assert line.startswith(f"n = 8: 0 of 1 statements decided, {opened}; ")
        assert line.endswith("a share near one half, which more texts will hardly decide")


def test_parts_that_differ_in_their_draws_are_damaged(tmp_path):
    with RunFolder(tmp_path, {}) as folder:
        folder.save_arrays({"part/a": np.ones(3), "part/b": np.ones(2)})
        with pytest.raises(RunError, match="the arrays of part differ in the number of draws"):
            rounds.extend_part(folder, "part", 4, lambda start: {})
