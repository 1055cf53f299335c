"""Seeds of cells in chunks: in order, resumed after the last one saved, whatever its size was.

How many seeds are computed at a time, and what is said of it.
"""

import copy
import re

import jax
import numpy as np
import pytest

from experiments import run_path_chains
from experiments.shell import cli, memory
from experiments.shell.devices import mesh
from experiments.shell.executor import Chunk, Executor, Mapped, named, seeds_done
from experiments.shell.flag_values import Group
from experiments.shell.memory import MemoryBudget
from rank_collapse.runs import seeds
from rank_collapse.runs.files import RunError
from rank_collapse.runs.folder import RunFolder

CELLS = {"low": 0.5, "high": 2.0}
KEYS = seeds.seed_keys(0, 5)


def scaled(key, factor):
    """Of whole numbers and powers of two, so that no arithmetic rounds."""
    bits = jax.random.bits(key, (2,))
    return {"of": {"bits": bits, "scaled": factor * (bits % 1024).astype(float)}}


def options_of(gigabytes=1, devices=2):
    arguments = f"--memory_gb={gigabytes}", f"--num_devices={devices}", "--num_seeds=5"
    return cli.parse(run_path_chains.FLAGS, arguments)


class Noted(Mapped):
    """`scaled`, with the chunks it was asked for."""

    def __init__(self, mesh, chunks, stop_at=None):
        super().__init__(scaled, mesh)
        self.chunks, self.stop_at = chunks, stop_at

    def __call__(self, chunk):
        if len(self.chunks) == self.stop_at:
            raise KeyboardInterrupt
        self.chunks.append(list(zip(chunk.cells, chunk.seeds, strict=True)))
        return super().__call__(chunk)


def found_in(path, options, stop_at=None, cells=CELLS, **about):
    """(what there is of all seeds of all cells, the chunks that were computed)."""
    chunks = []
    with RunFolder(path, {}) as run, Executor(options, run) as executor:
        found = executor.map(lambda: Noted(executor.mesh, chunks, stop_at), cells, **about)
    return found, chunks


def check(found):
    """Each seed of each cell is what the function gives of it alone."""
    assert list(found) == list(CELLS)
    for cell, factor in CELLS.items():
        for seed in range(5):
            for name, value in scaled(KEYS[seed], factor)["of"].items():
                np.testing.assert_array_equal(found[cell][f"of/{name}"][seed], value)


FEWER = {"most_known": dict.fromkeys(CELLS, 3)}
LEFT = [[(cell, seed) for cell in CELLS for seed in (3, 4)]]


@pytest.mark.parametrize(("about", "again"), [({}, []), (FEWER, LEFT)])
def test_all_cells_are_one_list_of_seeds_and_those_that_are_kept_stay(about, again, tmp_path):
    """Where nothing is left no program is made."""
    whole = [[(cell, seed) for cell in CELLS for seed in range(5)]]
    for how, expected in (({}, whole), (about, again)):
        found, chunks = found_in(tmp_path, options_of(), **how)
        check(found)
        assert chunks == expected


def test_chunks_fit_the_budget_and_a_run_resumes_under_another(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        found_in(tmp_path, options_of(1e-9), stop_at=2)
    with RunFolder(tmp_path, {}) as run:
        assert len(run.part("low")["of/bits"]) == 4 and run.part("high") is None
    found, chunks = found_in(tmp_path, options_of(1, devices=1), most=4)
    check(found)
    left = [("low", 4), *(("high", seed) for seed in range(5))]
    assert chunks == [left[:4], left[4:]]


def test_the_first_of_a_group_computes_all_of_its_cells_and_each_keeps_its_own(tmp_path):
    """Floats of --sweep are cells as those of a list; a member without cells fails alone."""
    members = [copy.deepcopy(options_of()) for _ in range(3)]
    for number, member in enumerate(members):
        member.join(Group(tmp_path / "group", members))
        member.num_paths = number + 1

    def cells_of(options):
        if options.num_paths == 2:
            raise ValueError("two paths")
        return {name: options.num_paths * factor for name, factor in CELLS.items()}

    for number in (2, 0):
        found, chunks = found_in(tmp_path / str(number), members[number], cells=cells_of)
        check(
            {
                name: own | {"of/scaled": own["of/scaled"] / (number + 1)}
                for name, own in found.items()
            }
        )
        assert [len(chunk) for chunk in chunks] == [20] * (number == 2)
        with RunFolder(tmp_path / str(number), {}) as run:
            assert {name.split("/")[0] for name in run.arrays} == set(CELLS)
    with pytest.raises(ValueError, match="two paths"):
        found_in(tmp_path / "1", members[1], cells=cells_of)


def test_a_program_takes_no_less_than_its_arrays():
    program = Mapped(scaled, mesh(options_of()))
    for size in (6, 2):
        chunk = Chunk(("low",) * size, range(size), seeds.seed_keys(0, size), np.ones(size), size)
        # A key of 8 bytes, a factor, twice two numbers.
        assert program.needed(chunk) >= size * (8 + 4 + 8 + 8)
    alone = [jax.random.bits(key, (2,)) for key in chunk.keys]
    np.testing.assert_array_equal(program(chunk)["of"]["bits"], alone)


def test_saved_seeds_are_counted_and_cut_arrays_refused(tmp_path):
    part = named({"a": np.zeros((2, 3)), "b": {"c": np.zeros((2, 3))}})
    assert list(part) == ["a", "b/c"]

    def done(part, total):
        return seeds_done(part, total, tmp_path, "x")

    assert done(part, 2) == 2 and done({}, 2) == 0
    assert done(part | {"b/c": np.zeros(2)}, 4) == 2
    for cut in (np.zeros((1, 3)), np.array(0.0)):
        with pytest.raises(RunError, match="x is not of 2 seeds"):
            done(part | {"b/c": cut}, 2)
    with pytest.raises(RunError, match="x is not of 1 seeds"):
        done(part, 1)


def budget_of(gigabytes, said=None):
    """Of two devices; its lines are put into `said`."""
    said = [] if said is None else said
    options = cli.parse(run_path_chains.FLAGS, [f"--memory_gb={gigabytes}"])
    return MemoryBudget(options, seeds.seed_mesh(jax.devices()[:2]), said.append)


@pytest.mark.parametrize(
    ("each", "asked", "tried"),
    [
        (10**7, 16, [16]),
        (10**8, 16, [16, 10]),
        (10**9, 4, [4, 2]),  # one a device at the least, whatever it takes
        (249_999_999, 6, [6, 4]),
        (250_000_001, 4, [4, 2]),  # rounding up to the devices would try 4 again
        (0, 3, [4]),  # padded to the devices
    ],
)
def test_as_many_seeds_at_a_time_as_fit(each, asked, tried):
    sizes = []

    def needed(size):
        sizes.append(size)
        return size * each

    assert budget_of(1).fit(needed, asked) == tried[-1] and sizes == tried


def test_what_no_memory_holds_is_refused(monkeypatch):
    """It was begun, and killed by the system without a line."""
    monkeypatch.setattr(memory, "free", lambda: 3 * 10**9)
    assert budget_of(1).fit(lambda size: size * 10**9, 4) == 2  # above the budget, not above that
    with pytest.raises(ValueError, match=r"2 seeds at a time, the fewest, take 4 GB .* 3 GB are f"):
        budget_of(1).fit(lambda size: size * 2 * 10**9, 4)


def test_no_more_seeds_than_asked_for_at_a_time():
    assert budget_of(1).fit(lambda size: size, count=16, most=5) == 6  # padded to the devices


def test_a_budget_that_the_fewest_seeds_do_not_fit_is_warned_of(capsys):
    lines = []
    assert budget_of(1e-9, lines).fit(lambda size: size * 10**7, 16) == 2
    said = "warning: 0.02 GB expected for 2 of 16 seeds at a time, the fewest, are more than the"
    assert lines[0] == f"{said} budget of 1e-09 GB" and capsys.readouterr().err == f"{lines[0]}\n"
    assert budget_of(1).fit(lambda size: size * 10**7, 16) == 16
    assert capsys.readouterr().err == ""


def test_nothing_is_printed_where_nothing_was_computed_or_all_failed(capsys):
    with budget_of(1):
        pass
    with pytest.raises(ValueError), budget_of(1) as budget:
        budget.fit(lambda size: size, 2)
        raise ValueError
    assert capsys.readouterr().err == ""


def test_what_the_seeds_took_is_said_at_the_end(capsys):
    """What was used is no less than a process."""
    with budget_of(1e-9) as budget:
        budget.fit(lambda size: size * 10**7, 16)
    line = r"memory: 0\.02 GB expected for (\d+) of (\d+) seeds at a time beside \S+ GB, "
    line += r"a budget of 1e-09 GB; at most (\S+) GB in use"
    *seeds, peak = re.search(line, capsys.readouterr().err).groups()
    assert seeds == ["2", "16"] and 0.1 < float(peak) < 1000
