"""Seeds of cells in chunks: in order, resumed after the last one saved, whatever its size was."""

import json

import jax
import numpy as np
import pytest

from experiments.lab import cli, folder, list_points, shared_flags
from experiments.lab.executor import Executor, Mapped, make_chunk, name_leaves, nest_arrays
from experiments.lab.folder import RunFolder
from experiments.lab.progress import Progress
from rank_collapse.runs import memory, seeds
from rank_collapse.runs.files import RunError
from tests.support.refusals import is_refused

FLAGS = cli.make_flags("scaled", num_seeds=5, shows="bits", traced=("skip_gain",), can_grow=True)
shared_flags.define(FLAGS, skip_gain=1.0)
CELLS = {"low": 0.5, "high": 2.0}
KEYS = seeds.seed_keys(0, 5)


def scale_bits(key, factor):
    """Of whole numbers and powers of two, so that no arithmetic rounds."""
    bits = jax.random.bits(key, (2,))
    return {"of": {"bits": bits, "scaled": factor * (bits % 1024).astype(float)}}


def parse_options(*arguments, devices=2):
    """Options of the first point."""
    return list_points(cli.parse_flags(FLAGS, [f"--num_devices={devices}", *arguments]))[0]


class Noted(Mapped):
    """`scale_bits`, which records the chunks it was asked for."""

    def __init__(self, mesh, chunks, stop_at=None):
        super().__init__(scale_bits, mesh, Progress(0, ""))
        self.chunks, self.stop_at = chunks, stop_at

    def __call__(self, chunk):
        if len(self.chunks) == self.stop_at:
            raise KeyboardInterrupt
        self.chunks.append(list(zip(chunk.cells, chunk.seeds, strict=True)))
        return super().__call__(chunk)


def run_cells(path, options, stop_at=None, cells=CELLS, **about):
    """Returns the results of all seeds of all cells, and the chunks that were computed."""
    chunks = []
    with RunFolder(path, {}) as run, Executor(options, run) as executor:
        program = Noted(executor.mesh, chunks, stop_at)
        for chunk in executor.chunks(cells, program, **about):
            executor.save(chunk, program(chunk))
        return executor.read(cells), chunks


def check(results, times=1):
    """Each seed of each cell is what the function gives of it alone."""
    assert list(results) == list(CELLS)
    for cell, factor in CELLS.items():
        for seed in range(5):
            for name, value in scale_bits(KEYS[seed], times * factor)["of"].items():
                np.testing.assert_array_equal(results[cell][f"of/{name}"][seed], value)


def test_all_cells_are_one_list_of_seeds_and_what_is_there_is_read(tmp_path):
    all_seeds = [[(cell, seed) for cell in CELLS for seed in range(5)]]
    for expected in (all_seeds, []):
        results, chunks = run_cells(tmp_path, parse_options())
        check(results)
        assert chunks == expected


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_an_earlier_commit_began_with_fewer_measures_is_refused(tmp_path, finished):
    """Unless it is finished: then it is what that commit published."""
    run_cells(tmp_path, parse_options())
    with np.load(tmp_path / "arrays.npz") as saved:
        arrays = {name: saved[name] for name in saved.files if name != "high/of/scaled"}
    np.savez(tmp_path / "arrays.npz", **arrays)
    content = json.loads((tmp_path / "config.json").read_text())
    content["arrays"].remove("high/of/scaled")
    (tmp_path / "config.json").write_text(json.dumps(content))
    if finished:
        with RunFolder(tmp_path, {}) as run:
            run.finish({})
        results, _ = run_cells(tmp_path, parse_options())
        assert [*results["high"]] == ["of/bits"]
    else:
        message = r"arrays\.npz .*it lacks high/of/scaled\); delete this file"
        is_refused(message, run_cells, tmp_path, parse_options(), error=RunError)


@pytest.mark.parametrize("draw", [None, lambda key, _: jax.random.normal(key, (3,))])
def test_the_names_of_arrays_are_known_before_they_are_computed(draw):
    options = parse_options()
    with Executor(options, FakeRun()) as executor:
        fn = (lambda x, factor: {"a": {"b": factor * x}, "c": factor}) if draw else scale_bits
        program = Mapped(fn, executor.mesh, Progress(0, ""), draw=draw)
        chunk = make_chunk(CELLS, KEYS, [("low", 0)], executor.mesh.size)
        assert program.name_arrays(chunk) == name_leaves(program(chunk)).keys()


class FakeRun:
    """A run folder without files."""

    def at(self, prefix):
        return self

    def log(self, message):
        pass

    def flush_arrays(self):
        pass


def test_a_run_resumes_where_it_was_with_chunks_of_another_size(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_cells(tmp_path, parse_options(), stop_at=2, most=2)
    with RunFolder(tmp_path, {}) as run:
        assert len(run.part("low")["of/bits"]) == 4 and run.part("high") is None
    results, chunks = run_cells(tmp_path, parse_options(devices=1), most=4)
    check(results)
    remaining = [("low", 4), *(("high", seed) for seed in range(5))]
    assert chunks == [remaining[:4], remaining[4:]]


@pytest.mark.parametrize(("pause", "writes"), [(1000.0, 1), (-1.0, 5)])
def test_small_chunks_are_written_together(pause, writes, tmp_path, monkeypatch):
    """Where the last write is long ago, each chunk is written by itself; else all at the end."""
    written, save = [], RunFolder.save_arrays

    def record_write(run, arrays):
        written.append(run.path)
        save(run, arrays)

    monkeypatch.setattr(folder, "PAUSE", pause)
    monkeypatch.setattr(folder, "SHARE", 1e9)
    monkeypatch.setattr(RunFolder, "save_arrays", record_write)
    results, chunks = run_cells(tmp_path, parse_options(), most=2)
    check(results)
    assert len(chunks) == 5 and len(written) == writes


def test_traced_axes_are_cells_of_one_list_and_a_point_without_cells_is_left_out(tmp_path):
    points = parse_options("--skip_gain=0,1,2").group

    def make_cells(options):
        if options.skip_gain == 1:
            raise ValueError("no gain of one")
        return {name: (options.skip_gain + 1) * factor for name, factor in CELLS.items()}

    for member in (points[2], points[0]):
        results, chunks = run_cells(tmp_path, member, cells=make_cells)
        check(results, times=member.skip_gain + 1)
        assert [len(chunk) for chunk in chunks] == [20] * (member is points[2])
    with pytest.raises(ValueError, match="no gain of one"):
        run_cells(tmp_path, points[1], cells=make_cells)


@pytest.mark.parametrize("stop_at", [None, 1])
def test_progress_counts_the_seeds_of_all_points_of_a_group(stop_at, tmp_path):
    """Also those that the run has, and without the seeds that pad the last chunk."""
    points = parse_options("--skip_gain=0,1,2").group

    def run_point(options, stop_at=None):
        with (
            RunFolder(tmp_path, {}) as run,
            Executor(options, run, "cells", total=2 * options.num_seeds) as executor,
        ):
            program = Noted(executor.mesh, [], stop_at)
            for chunk in executor.chunks(make_cells, program, most=4):
                executor.save(chunk, program(chunk))
            return executor.progress

    def make_cells(options):
        return {name: options.skip_gain + factor for name, factor in CELLS.items()}

    if stop_at:
        with pytest.raises(KeyboardInterrupt):
            run_point(points[0], stop_at)
    for options in points[:2]:  # the second one finds all of its seeds
        progress = run_point(options)
        assert progress.total == progress.n == 3 * 2 * 5


def test_seeds_begin_with_the_first_one_of_the_flags(tmp_path):
    options = parse_options("--seed=7", "--first_seed=3")
    results, _ = run_cells(tmp_path, options)
    for number, bits in enumerate(results["high"]["of/bits"]):
        key = jax.random.fold_in(jax.random.key(7), 3 + number)
        np.testing.assert_array_equal(bits, jax.random.bits(key, (2,)))


def test_nested_results_are_named_by_their_paths():
    part = name_leaves({"a": np.zeros((2, 3)), "b": {"c": np.zeros((2, 3))}})
    assert list(part) == ["a", "b/c"]


def test_arrays_are_nested_at_each_slash_of_their_names():
    arrays = {"a": np.zeros(1), "b/c": np.zeros(2), "b/d/e": np.zeros(3)}
    nested = nest_arrays(arrays)
    assert nested.keys() == {"a", "b"} and nested["b"].keys() == {"c", "d"}
    assert name_leaves(nested).keys() == arrays.keys()
    assert [len(array) for array in name_leaves(nested).values()] == [1, 2, 3]


def test_a_chunk_without_its_padding_has_the_keys_and_floats_of_its_seeds():
    chunk = make_chunk(CELLS, KEYS, [("low", 1), ("high", 0)], 4)
    keys, floats = chunk.unpadded
    assert floats.tolist() == [0.5, 2.0]
    assert (jax.random.key_data(keys) == jax.random.key_data(KEYS)[np.array([1, 0])]).all()


def test_a_finished_run_makes_no_keys(tmp_path, monkeypatch):
    """Keys are made by a program, which would compile for nothing."""
    results, _ = run_cells(tmp_path, parse_options())
    with RunFolder(tmp_path, {}) as run:
        run.finish({})
    monkeypatch.setattr(seeds, "fold_seeds", lambda *_: pytest.fail("keys of a finished run"))
    again, chunks = run_cells(tmp_path, parse_options())
    assert chunks == []
    for cell, arrays in results.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(again[cell][name], array)


def test_chunks_that_are_done_are_kept_where_a_later_one_fails(tmp_path):
    options = parse_options()
    failing = pytest.raises(RuntimeError, match="the disk is full")
    with RunFolder(tmp_path, {}) as run, failing, Executor(options, run) as executor:
        for chunk in executor.chunks(CELLS, most=2):
            executor.save(chunk, {"seed": np.array(chunk.seeds)})
            if chunk.seeds[-1] == 3:
                raise RuntimeError("the disk is full")
    with RunFolder(tmp_path, {}) as run:
        assert run.part("low")["seed"].tolist() == [0, 1, 2, 3] and run.part("high") is None


@pytest.mark.parametrize("bits", [np.zeros((1, 2)), np.zeros((6, 2)), np.array(0.0)])
def test_cut_arrays_and_more_seeds_than_asked_for_are_refused(bits, tmp_path):
    with RunFolder(tmp_path, {}) as run:
        run.save_arrays({"low/of/bits": bits, "low/of/scaled": np.zeros((6, 2))})
    with pytest.raises(RunError, match="low does not have 5 seeds"):
        run_cells(tmp_path, parse_options())


def test_a_run_that_grows_may_have_more_seeds_than_its_first_round(tmp_path):
    saved = np.arange(12.0).reshape(6, 2)
    with RunFolder(tmp_path, {}) as run:
        names = [f"{cell}/of/{name}" for cell in CELLS for name in ("bits", "scaled")]
        run.save_arrays(dict.fromkeys(names, saved))
    results, chunks = run_cells(tmp_path, parse_options("--until=decided"))
    assert chunks == []
    for cell in CELLS:
        np.testing.assert_array_equal(results[cell]["of/bits"], saved[:5])


@pytest.mark.parametrize("names", [{"bits": 2}, {"bits": 2, "scaled": 3}])
def test_seeds_with_other_arrays_are_not_added_to(names, tmp_path):
    arrays = {f"low/of/{name}": np.zeros((2, size)) for name, size in names.items()}
    with RunFolder(tmp_path, {}) as run:
        run.save_arrays(arrays)
    with pytest.raises(RunError, match=r"arrays\.npz .*of low of/scaled is "):
        run_cells(tmp_path, parse_options())
    with RunFolder(tmp_path, {}) as run:
        assert run.arrays.keys() == arrays.keys()


def test_seeds_at_a_time_are_those_that_fit_into_memory(tmp_path, monkeypatch):
    """Programs of half of the memory's bytes; the same results, in smaller chunks."""
    asked = []

    def compile_largest(compile_size, size, least, mesh):
        asked.append((size, least))
        return compile_size(4), 4

    monkeypatch.setattr(memory, "compile_largest", compile_largest)
    results, chunks = run_cells(tmp_path / "run", parse_options())
    assert asked == [(10, 2)] and [len(chunk) for chunk in chunks] == [4, 4, 2]
    check(results)
    asked.clear()
    with RunFolder(tmp_path / "measured", {}) as run, Executor(parse_options(), run) as executor:
        check(executor.measure(scale_bits, CELLS))
    assert asked == [(10, 2)]


def test_a_chunk_of_another_size_compiles_nothing(caplog):
    pairs = [("low", 1), ("low", 3), ("high", 0)]
    with jax.log_compiles():
        chunk = make_chunk(CELLS, KEYS, pairs, 7)
    assert not [r for r in caplog.records if r.message.startswith("Compiling")]
    drawn = jax.random.key_data(chunk.keys)
    np.testing.assert_array_equal(drawn, jax.random.key_data(KEYS)[np.array([1, 3, *[0] * 5])])
    assert chunk.floats.tolist() == [0.5, 0.5, *[2.0] * 5]


def test_chunks_are_no_larger_than_the_seeds_that_are_missing(tmp_path):
    with RunFolder(tmp_path, {}) as run, Executor(parse_options(), run) as executor:
        (chunk,) = executor.chunks(CELLS, most=64)
    assert len(chunk.keys) == len(chunk.seeds) == 10


def test_a_program_takes_chunks_of_several_sizes():
    with Executor(parse_options(), FakeRun()) as executor:
        program = Mapped(scale_bits, executor.mesh, Progress(0, ""))
        for size in (2, 4):
            chunk = make_chunk(CELLS, KEYS, [("low", seed) for seed in range(size)], size)
            bits = program(chunk)["of"]["bits"]
            np.testing.assert_array_equal(bits, [jax.random.bits(key, (2,)) for key in KEYS[:size]])


@pytest.mark.parametrize("at_once", [None, 3])
def test_a_program_is_spread_as_it_asks_and_draws_apart(at_once, monkeypatch):
    spread = []
    monkeypatch.setattr(seeds, "run_seeds", lambda *args, **options: spread.append(options))
    monkeypatch.setattr(seeds, "group_size", lambda mesh: {"mesh": 7}[mesh])
    about = {"draw": lambda key, floats: key, "at_once": at_once, "level": 2}
    Mapped(lambda x, floats: x, "mesh", Progress(0, ""), **about)
    count = 7 if at_once is None else 3
    assert spread == [
        {"at_once": count, "level": 2},
        {"at_once": count, "level": 0},
    ]


def test_keys_of_the_caller_are_as_many_as_its_seeds(tmp_path):
    results, chunks = run_cells(tmp_path, parse_options(), keys=KEYS[2:5])
    assert chunks == [[(cell, seed) for cell in CELLS for seed in range(3)]]
    for cell in CELLS:
        bits = np.stack([jax.random.bits(key, (2,)) for key in KEYS[2:5]])
        np.testing.assert_array_equal(results[cell]["of/bits"], bits)
    with RunFolder(tmp_path, {}) as run, Executor(parse_options(), run) as executor:
        assert len(executor.read(CELLS, KEYS[:2])["low"]["of/bits"]) == 2


def test_progress_names_the_experiment_and_what_is_computed(tmp_path):
    """By default it counts the seeds of one cell at all points of a group."""
    options = parse_options()
    with RunFolder(tmp_path, {}) as run:
        for point, label, expected, total in (
            (options, "cells", "scaled, cells", 5),
            (parse_options("--skip_gain=0,1"), "scaled", "scaled", 10),
        ):
            with Executor(point, run, label) as executor:
                assert (executor.progress.label, executor.progress.total) == (expected, total)
        (named,) = list_points(cli.parse_flags(cli.make_flags("two_words", num_seeds=1), []))
        with Executor(named, run, "two words") as executor:
            assert executor.progress.label == "two words"
        with Executor(options, run) as executor:
            assert executor.progress.disable
    with RunFolder(tmp_path, {}, read_only=True) as run, Executor(options, run, "cells") as reader:
        assert reader.progress.disable


def test_a_folder_that_is_only_read_names_the_first_cell_that_it_lacks(tmp_path):
    with RunFolder(tmp_path, {}) as run:
        run.save_arrays({"low/of/bits": np.zeros((5, 2)), "high/of/bits": np.zeros((3, 2))})
    cells = CELLS | {"higher": 4.0}
    refused = pytest.raises(RunError, match="it lacks seeds of 'high'")
    with RunFolder(tmp_path, {}, read_only=True) as run, refused:
        next(Executor(parse_options(), run).chunks(cells))


def test_chunks_have_the_size_of_the_flag(tmp_path):
    flags = cli.make_flags("scaled", num_seeds=5)
    shared_flags.define(flags, seed_chunk=0)
    for size, sizes in ((4, [4, 4, 2]), (0, [10])):
        arguments = [f"--seed_chunk={size}", "--num_devices=1"]
        (options,) = list_points(cli.parse_flags(flags, arguments))
        with RunFolder(tmp_path / str(size), {}) as run, Executor(options, run) as executor:
            assert [len(chunk.seeds) for chunk in executor.chunks(CELLS)] == sizes
