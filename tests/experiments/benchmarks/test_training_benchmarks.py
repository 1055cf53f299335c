"""Benchmarks of training runs at tiny size: what they time agrees."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.benchmarks import (
    torch_processes,
    training_benchmarks,
)
from experiments.benchmarks.timing import (
    median_ratio,
)
from experiments.lab import devices
from rank_collapse.runs.seeds import seed_mesh
from tests.oracles.benchmark_reports import find_figure, parse_two_rounds


@pytest.mark.full
@pytest.mark.parametrize("name", training_benchmarks.CASES)
def test_training_benchmarks_take_the_published_commands(name):
    tiny = training_benchmarks.TINY
    report = training_benchmarks.time_training(name, parse_two_rounds(), tiny)
    (ours,) = report.timings
    assert ours.compile_seconds > 0 and len(ours.seconds) == 2
    assert find_figure(report, "ms per seed") == 1e3 * min(ours.seconds)


@pytest.mark.full
def test_every_way_of_pytorch_is_timed_in_the_same_rounds(capsys):
    pytest.importorskip("torch")
    options = parse_two_rounds("--baseline=torch")
    report = training_benchmarks.time_training(
        "sort", options, training_benchmarks.TINY, num_seeds=3
    )
    names = [way.name for way in torch_processes.list_ways(devices.count_cores(), 3)]
    assert [timing.name for timing in report.timings[:-1]] == names
    assert all(len(timing.seconds) == 2 and timing.best > 0 for timing in report.timings)
    *baselines, ours = report.timings
    times_faster = find_figure(report, "times faster than the best of PyTorch")
    assert times_faster == min(1 / median_ratio(ours, timing) for timing in baselines)
    assert 0 < find_figure(report, "share of that rate") < 1


TEXTS = [1] * 17  # of an epoch


@dataclasses.dataclass
class PackedRecipe:
    """A recipe, whose batches are of packed rows."""

    batch_size: int


class Clock:
    """A clock that stands still but for the seconds that a stub takes."""

    def __init__(self, monkeypatch, module, name="perf_counter"):
        self.now = 100.0
        monkeypatch.setattr(module.time, name, lambda: self.now)

    def take(self, seconds):
        self.now += seconds


def test_figures_of_training_follow_from_the_times_of_all_rounds(monkeypatch, capsys):
    """Seconds are per seed and step; the best of PyTorch is the one with the least ratio."""
    options = parse_two_rounds("--baseline=torch", "--rounds=3")
    clock, one = Clock(monkeypatch, training_benchmarks), seed_mesh(jax.devices()[:1])
    epochs, ways = iter([3.0, 24.0, 12.0, 36.0]), torch_processes.list_ways(2, 4)
    asked, measured = [], []

    class Program:
        size, functions = 4, SimpleNamespace(step=SimpleNamespace(closed="program"))

        def compile(self, size):
            clock.take(2.0)

        def advance(self, runs, epoch):
            clock.take(next(epochs))
            asked.append(epoch)
            return runs + 1, None

    def begin_ensemble(recipe, make_data, mesh, epochs_per_chunk):
        assert epochs_per_chunk == 1

        def begin(keys, hyper):
            assert len(keys) == 4
            np.testing.assert_array_equal(hyper.learning_rate, np.full(4, np.float32(1e-3)))
            np.testing.assert_array_equal(hyper.dropout, np.full(4, np.float32(0.1)))
            return Program(), 0

        return SimpleNamespace(mesh=one, begin=begin)

    class Processes(contextlib.nullcontext):
        def __init__(self, task, count):
            super().__init__(self)
            assert task == ("task", 5, TEXTS) and count == max(way.processes for way in ways)

        def measure(self, way, steps):
            measured.append((way.name, steps))
            return 0.5 * (1 + ways.index(way)) if way is not ways[2] else 0.25

    recipe = PackedRecipe(batch_size=2)
    data = {"train": range(9), "texts": TEXTS}
    rates = iter([10.0, 40.0, 20.0])
    for name, stub in (
        ("make_case", lambda *_: (recipe, lambda key: data, 5)),
        ("Ensemble", begin_ensemble),
        ("LargeProduct", lambda mesh: SimpleNamespace(measure_rate=lambda: next(rates))),
        ("count_flops", lambda program: 400.0),
        (
            "list_ways",
            lambda cores, count, platform: ways if count == 4 else 0,
        ),
        ("describe_task", lambda r, examples, *_: ("task", r.batch_size, examples)),
        ("Processes", Processes),
    ):
        monkeypatch.setattr(training_benchmarks, name, stub)
    report = training_benchmarks.time_training("sort", options, num_seeds=4)
    *baselines, ours = report.timings
    steps = 4  # of 5 of the 17 texts, not of 2 of the 9 packed rows
    assert asked == [1, 2, 3, 4] and ours.compile_seconds == 5.0
    assert ours.seconds == [24.0 / steps / 4, 12.0 / steps / 4, 36.0 / steps / 4]
    assert ours.name == "ours, 4 seeds on 1 devices"
    names = [way.name for way in ways]
    assert [timing.name for timing in baselines] == names
    assert measured == [(name, 1) for name in names] + 3 * [(name, steps) for name in names]
    assert baselines[2].seconds == [0.25] * 3 and baselines[1].seconds == [1.0] * 3
    shares = [400.0 / steps / s / r for s, r in zip(ours.seconds, (10, 40, 20), strict=True)]
    assert report.figures == {
        "ms per seed and step, ours": (750.0, None),
        "MFLOP of the products of a seed's step": (1e-4, None),
        "GFLOP/s of a large product on all devices": (4e-8, None),
        "share of that rate, ours": (pytest.approx(np.median(shares)), None),
        f"ms per seed and step, the best of PyTorch ({names[2].removeprefix('PyTorch, ')})": (
            250.0,
            None,
        ),
        "times faster than the best of PyTorch (asked 4)": (0.25 / 1.5, None),
        "ours as a share of the best of PyTorch": (1.5 / 0.25, 0.25),
    }
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("first epoch 5.0 s, with compiling")
    assert lines[1].endswith("0.25 s, 2 s, 2.5 s, 1.5 s a seed and step") and len(lines) == 4
    # PyTorch is timed where it is asked for, and where it has this network.
    measured.clear()
    for name, flags in (("sort", ()), ("translation", ("--baseline=torch",))):
        monkeypatch.setitem(training_benchmarks.SEEDS, name, 4)  # by default
        epochs, rates = iter([3.0, 24.0]), iter([10.0])
        alone = training_benchmarks.time_training(name, parse_two_rounds(*flags, "--rounds=1"))
        assert [timing.name for timing in alone.timings] == ["ours, 4 seeds on 1 devices"]
        assert alone.timings[0].seconds == [1.5] and not measured
        assert [*alone.figures] == [*report.figures][:4]


def test_lengths_of_the_random_texts_are_those_of_rte():
    """Texts of 12 to 128 of 6000 token ids; what is behind a text is 0, and not read."""
    recipe, make_data, batch_size = training_benchmarks.make_case(
        "memorization", ("--n_train_data=300", "--batch_sz=7")
    )
    data = make_data(jax.random.key(0))
    examples = data.get("texts", data["train"])
    mask = np.asarray(examples.mask)
    lengths = mask.sum(axis=1)
    assert batch_size == 7 and mask.shape == (300, 128)
    assert lengths.min() == 12 and lengths.max() == 128
    assert abs(np.median(lengths) - 48) < 6 and abs(lengths.mean() - 59) < 5
    assert (mask == (np.arange(128) < lengths[:, None])).all()
    inputs = np.asarray(examples.inputs)
    assert (inputs[~mask] == 0).all() and 5000 < inputs.max() < 6000
    assert recipe.config.embedding.vocab_size == 6000
