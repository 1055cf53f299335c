"""What needs a device, at toy size on a CPU; devices that are not there; computed costs."""

import json
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments import benchmark
from experiments.benchmarks import (
    absent_devices,
    accelerator,
    children,
    cost_model,
    counting,
    scheduler,
    suite,
    timing,
)
from experiments.shell import cli

DOCS = Path(__file__).parents[2] / "docs"


def execute(*given):
    return cli.execute(benchmark.main, benchmark.FLAGS, given)


def toy(*given):
    return cli.parse(benchmark.FLAGS, ["--rounds=1", "--suite_size=toy", *given])


def figures_of(name):
    return {n: v for n, (v, _) in accelerator.BENCHMARKS[name](toy()).figures.items()}


def test_every_measure_is_compared_with_float64(monkeypatch):
    """Other precisions, which are all the same on a CPU, and networks are in the slow tests."""
    monkeypatch.setattr(accelerator, "PRECISIONS", ("highest",))
    monkeypatch.setattr(accelerator, "NETWORKS", ())
    found = figures_of("accuracy")
    assert set(found) == {f"{measure}, highest" for measure in rc.MEASURES}
    assert 0 < max(found.values()) < 1e-4


def test_a_large_difference_shows():
    assert timing.largest_difference([np.float32([1, 2])], [np.array([1.0, 4.0])]) == 0.5
    ends = np.array([-np.inf, 4.0])
    assert timing.largest_difference([np.float32([-np.inf, 2])], [ends]) == 0.5
    assert timing.largest_difference([np.float32([1, 4])], [ends]) == np.inf
    assert np.isnan(
        timing.largest_difference([np.float32([1]), np.float32([np.nan])], [np.ones(1)] * 2)
    )


def test_products_of_every_precision_are_right():
    found = figures_of("precision")
    assert all(found[f"error, {p}"] < 1e-5 for p in accelerator.PRECISIONS)


def test_block_diagonal_products_are_the_batched_ones():
    a, b = jax.random.normal(jax.random.key(0), (2, 16, 3, 3))
    np.testing.assert_allclose(accelerator._block_diagonal(a, b), a @ b, atol=1e-6)


class Children:
    """Stands for `children.found_by`: benchmarks named in `broken` fail."""

    def __init__(self, *broken):
        self.broken, self.ran = broken, []

    def __call__(self, module, first, *arguments, limit, XLA_FLAGS=""):
        name = first.removeprefix("--benchmark=")
        self.ran.append((name, XLA_FLAGS))
        if name in self.broken:
            raise subprocess.CalledProcessError(1, module)
        own = {"figures": {"speed": {"value": float(len(self.ran)), "limit": None}}}
        return {"device": "a device", "benchmarks": {name: own}}


def test_the_suite_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    report = accelerator.precision(toy())
    monkeypatch.setattr(suite.streaming, "streaming", lambda options, limit: report)
    path = tmp_path / "found.json"
    given = ("--suite=accelerator", f"--json={path}", "--suite_size=toy")
    first, second, third = Children("many_seeds"), Children(), Children()
    monkeypatch.setattr(suite.children, "found_by", first)
    assert execute(*given) == 1
    assert "missing: seeds; the same command computes them" in capsys.readouterr().out
    steps = [step for step in suite.STEPS.values() if step[0] != "streaming"]
    assert first.ran == steps
    monkeypatch.setattr(suite.children, "found_by", second)
    assert execute(*given) == 0 and second.ran == [suite.STEPS["seeds"]]
    found = json.loads(path.read_text())["steps"]
    assert all("found" in found[name] for name in suite.STEPS)
    table = path.with_suffix(".md").read_text()
    numbers = " | ".join(str(i) for i in range(6, 12))
    assert f"| speed | {numbers} |" in table and table.startswith("a device; toy size")
    path.with_suffix(".md").unlink()
    assert execute(*given) == 0 and len(second.ran) == 1
    assert path.with_suffix(".md").read_text() == table
    monkeypatch.setattr(suite.children, "found_by", third)
    assert execute(*given, "--overwrite") == 0 and len(third.ran) == len(steps)
    assert execute(*given[:2], "--suite_size=full") == 2
    assert "is not of --suite_size=full" in capsys.readouterr().err


def test_the_suite_ends_when_its_time_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite.time, "monotonic", iter([0.0, 0.0, 600.0]).__next__)
    monkeypatch.setattr(suite, "step", lambda *_: {"found": {"figures": {}}})
    assert execute("--suite=accelerator", f"--json={tmp_path / 'found.json'}") == 1
    printed = capsys.readouterr().out
    assert (
        printed.count("begins") == 1 and f"missing: {', '.join(list(suite.STEPS)[1:])}" in printed
    )
    monkeypatch.undo()
    (tmp_path / "child.py").write_text("import os; print('first'); print(os.environ['OWN'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert children.found_by("child", OWN="[3]") == [3]
    with pytest.raises(subprocess.TimeoutExpired):
        children.found_by("child", OWN="[3]", limit=0.001)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        children.found_by("child")


def test_figures_of_a_compiled_program():
    traced = jax.jit(lambda a, b: a @ b).trace(*jnp.ones((2, 8, 8)))
    found = absent_devices.figures(traced, counting.Device(1e3, 1e3, 1e9))
    assert found["GFLOP"] == 2 * 8**3 / 1e9
    assert found["GB moved"] == pytest.approx(3 * 256 / 1e9) == found["GB at the peak"]
    assert found["ms, computed"] == pytest.approx(2 * 8**3)
    assert "| x | 1.02e-06 |" in absent_devices.table({"x": found})


def test_an_epoch_of_training_is_traced_for_a_mesh():
    mesh = rc.runs.seeds.seed_mesh(jax.devices()[:1])
    traced, steps = absent_devices.epoch_of("sort", 3, mesh, "toy")
    assert steps == 2
    (one, few) = (
        counting.product_flops(t.jaxpr.jaxpr)
        for t in (absent_devices.epoch_of("sort", 1, mesh, "toy")[0], traced)
    )
    # 4 x 8 tokens of width 8, forward and twice as much backward
    layer, embedding, classifier = 8 * 8 * 8 + 4 * 8 * 8, 2 * 8 * 8, 2 * 8 * 10
    assert few == 3 * one == 3 * steps * 3 * 4 * 8 * (layer + embedding + classifier)


def test_operations_in_loops_and_branches_are_counted():
    def fn(a):
        many = jax.lax.fori_loop(0, 5, lambda _, x: x @ a, a)
        return jax.lax.cond(a[0, 0] > 0, lambda x: x @ a @ a, lambda x: x @ a, many)

    product = 2 * 4**3
    found = counting.product_flops(jax.make_jaxpr(fn)(jnp.ones((4, 4))).jaxpr)
    assert found == 7 * product


def test_how_many_seeds_fit():
    peaks = {count: 5e6 + 1e6 * count for count in (1, 64, 1024)}
    assert counting.seeds_that_fit(peaks, 5e6 + 70.5e6) == 70


@pytest.mark.parametrize("size", [("1.1b", 1), ("7b", 4)])
def test_the_cost_model_is_within_15_percent_of_what_was_measured(size):
    """Measured: the table of docs/benchmarks.md."""
    row = re.search(rf"\| {size[0]}, {size[1]} \|.*", (DOCS / "benchmarks.md").read_text())[0]
    gigabytes, flops, seconds, peak = (
        float(re.search(r"[\d.]+", cell)[0]) for cell in row.split("|")[2:6]
    )
    found = cost_model.streaming_cost(*size, 64, cost_model.MACHINES["2 cores, 24 GB"])
    assert found.passes == 1
    assert found.read / 1e9 == pytest.approx(gigabytes, rel=0.15)
    assert found.flops / 1e12 == pytest.approx(flops, rel=0.15)
    assert found.seconds == pytest.approx(seconds, rel=0.15)
    assert found.peak / 1e9 == pytest.approx(peak, rel=0.15)


def test_texts_whose_states_do_not_fit_take_several_passes():
    machine = cost_model.MACHINES["H100, 80 GB"]
    few, many = (cost_model.streaming_cost("7b", n, 64, machine) for n in (4, 10_000))
    assert many.passes > 1 and many.read == many.passes * few.read
    assert many.peak <= machine.memory
    with pytest.raises(ValueError, match=r"405b: .* GB do not fit"):
        cost_model.streaming_cost("405b", 1, 64, cost_model.MACHINES["2 cores, 24 GB"])
    assert "| 405b, 4 | 2 cores, 24 GB | does not fit |" in cost_model.table()


def test_the_benchmark_of_memory_runs_on_a_cpu():
    found = figures_of("peak_memory")
    assert found and all(np.isfinite(v) for v in found.values())


@pytest.mark.slow
def test_the_whole_suite_at_toy_size(tmp_path):
    path = tmp_path / "found.json"
    given = ["--suite=accelerator", "--suite_size=toy", "--rounds=1", f"--json={path}"]
    assert execute(*given, "--stream_texts=1", f"--stream_folder={tmp_path}") == 0
    steps = json.loads(path.read_text())["steps"]
    found = {
        name: {figure: own["value"] for figure, own in step["found"]["figures"].items()}
        for name, step in steps.items()
    }
    assert found.keys() == suite.STEPS.keys()
    assert all(np.isfinite(value) for own in found.values() for value in own.values())
    assert all(found["accuracy"][name] < 1e-4 for name in accelerator.NETWORKS)
    assert found["sharding"]["devices"] > 0 and found["sharding"]["largest difference"] < 1e-5
    rates = {"training steps a second, 4 seeds", "profiles a second, 1 seeds"}
    assert rates <= found["seeds"].keys()
    streamed = found["streaming"]
    assert streamed["error of the sum over all lengths"] < 1e-5
    assert streamed["GB of the checkpoint"] == pytest.approx(402560 / 1e9)
    assert streamed["GB at the process's peak"] > streamed["GB before the first layer"] > 0


@pytest.mark.slow
def test_empty_cells_are_handed_out():
    found = scheduler.empty_cells(toy(), count=20, places=4).figures
    assert (
        found["ms of time for each cell"][0]
        > found["ms of CPU for each cell, without workers"][0]
        > 0
    )


def test_a_program_that_the_compiler_refuses_leaves_an_empty_row(capsys):
    class Refused:
        def lower(self):
            raise jax.errors.JaxRuntimeError("no tiles\nmore")

    assert absent_devices.figures(Refused(), counting.DEVICES["h100"]) == {}
    assert capsys.readouterr().err == "no tiles\n"
    assert absent_devices.table({"x": {}}).splitlines()[-1] == "| x |  |  |  |  |  |  |"
