"""Seeds of cells in chunks: in order, resumed after the last one saved, whatever its size was."""

import jax
import numpy as np
import pytest

from experiments import run_path_chains
from experiments.shell import cli
from experiments.shell.devices import mesh
from experiments.shell.executor import Chunk, Executor, Mapped, named, seeds_done
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
        super().__init__(scaled, mesh, at_once=1)
        self.chunks, self.stop_at = chunks, stop_at

    def __call__(self, chunk):
        if len(self.chunks) == self.stop_at:
            raise KeyboardInterrupt
        self.chunks.append(list(zip(chunk.cells, chunk.seeds, strict=True)))
        return super().__call__(chunk)


def found_in(path, options, stop_at=None, **about):
    """(what there is of all seeds of all cells, the chunks that were computed)."""
    chunks = []
    with RunFolder(path, {}) as run, Executor(options, run) as executor:
        found = executor.map(lambda: Noted(executor.mesh, chunks, stop_at), CELLS, **about)
    return found, chunks


def check(found):
    """Each seed of each cell is what the function gives of it alone."""
    assert list(found) == list(CELLS)
    for cell, factor in CELLS.items():
        for seed in range(5):
            for name, value in scaled(KEYS[seed], factor)["of"].items():
                np.testing.assert_array_equal(found[cell][f"of/{name}"][seed], value)


def test_all_cells_are_one_list_of_seeds(tmp_path):
    found, chunks = found_in(tmp_path, options_of())
    check(found)
    assert chunks == [[(cell, seed) for cell in CELLS for seed in range(5)]]
    found, chunks = found_in(tmp_path, options_of())
    check(found)
    assert chunks == []  # and no program is made


def test_chunks_fit_the_budget_and_a_run_resumes_under_another(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        found_in(tmp_path, options_of(1e-9), stop_at=2)
    with RunFolder(tmp_path, {}) as run:
        assert len(run.part("low")["of/bits"]) == 4 and run.part("high") is None
    found, chunks = found_in(tmp_path, options_of(1, devices=1), most=4)
    check(found)
    left = [("low", 4), *(("high", seed) for seed in range(5))]
    assert chunks == [left[:4], left[4:]]


def test_seeds_that_are_not_wanted_are_computed_again_and_those_of_a_copy_not_saved(tmp_path):
    found_in(tmp_path, options_of())
    found, chunks = found_in(tmp_path, options_of(), most_known=3)
    check(found)
    assert chunks == [[(cell, seed) for cell in CELLS for seed in (3, 4)]]
    before = (tmp_path / "arrays.npz").stat().st_mtime_ns
    found, chunks = found_in(tmp_path, options_of(), again=True)
    check(found)
    assert len(chunks[0]) == 10 and (tmp_path / "arrays.npz").stat().st_mtime_ns == before


def test_what_is_refused_is_not_saved(tmp_path):
    def refuse(cell, found):
        raise ValueError(f"{cell}: {len(found['of/bits'])} seeds")

    with pytest.raises(ValueError, match="low: 2 seeds"):
        found_in(tmp_path, options_of(1e-9), check=refuse)
    with RunFolder(tmp_path, {}) as run:
        assert run.arrays == {}


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
