"""The benchmarks at tiny size: what they time agrees, and a figure above its limit fails."""

import dataclasses
import json
import os
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import benchmark
from experiments.benchmarks import (
    torch_processes,
    training_benchmarks,
)
from experiments.benchmarks.timing import (
    Report,
    Timing,
    print_report,
)
from experiments.lab import cli
from rank_collapse.training.training import Hyper, init_model


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [n for n, (_, _, target) in training_benchmarks.CASES.items() if target]
)
def test_pytorch_trains_the_same_network_by_a_loop_and_stacked(name):
    """As many parameters as ours; stacked seeds make the steps of each alone; losses fall."""
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    recipe, make_data, batch_size = training_benchmarks.make_case(name, training_benchmarks.TINY)
    recipe = dataclasses.replace(recipe, batch_size=batch_size, clip_norm=0.5)
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), recipe))
    data = make_data(jax.random.key(0))
    hyper = Hyper(learning_rate=1e-2, dropout=0.0)
    task = torch_processes.describe_task(recipe, data.get("texts", data["train"]), hyper)
    stacked = torch_baseline.StackedTraining(task, 3)
    single = torch_baseline.Training(task)
    assert sum(p.numel() for p in single.network.parameters()) == sum(
        leaf.size for leaf in jax.tree.leaves(shapes)
    )
    with torch.no_grad():
        for parameter_name, parameter in single.network.named_parameters():
            parameter.copy_(stacked.weights[parameter_name][1])
    batches, losses = torch_baseline.list_batches(task), []
    for index in range(20):
        batch = next(batches)
        single.step(*batch)
        stacked.step(*batch)
        losses.append(single.loss.item())
        if index:  # Adam makes steps of rounding where a gradient is zero
            continue
        slopes = {n: parameter.grad for n, parameter in single.network.named_parameters()}
        norm = torch.stack([slope.square().sum() for slope in slopes.values()]).sum().sqrt()
        assert 0.1 < norm.item() < 0.5001
        for parameter_name, slope in slopes.items():
            stacked_slope = stacked.weights[parameter_name].grad[1]
            torch.testing.assert_close(stacked_slope, slope, rtol=1e-3, atol=1e-5)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_a_figure_above_its_limit_is_exit_1(monkeypatch, capsys):
    def make_benchmark(limit):
        figures = {"size": (2.0, limit), "share": (0.25, 9.0), "rate": (5.0, 2 * limit)}
        return lambda options: Report([Timing("a", 0.0, [1.0])], figures)

    monkeypatch.setattr(
        benchmark, "BENCHMARKS", {"low": make_benchmark(1.0), "high": make_benchmark(3.0)}
    )
    monkeypatch.setitem(benchmark.CPU_SECONDS, "low", 70)
    execute = lambda *a: cli.execute(benchmark.main, benchmark.FLAGS, a)  # noqa: E731
    assert execute("--benchmark=high") == 0
    assert execute("--benchmark=high,low") == 1
    printed = capsys.readouterr().out
    assert printed.endswith(
        "\nover the limit: low: size = 2, limit 1\nover the limit: low: rate = 5, limit 2\n"
    )
    assert "\nlow, about 70 s of CPU with five rounds\n" in printed
    assert execute("--benchmark=middle") == 2
    assert "--benchmark=middle" in capsys.readouterr().err


def test_what_takes_minutes_runs_where_it_is_named():
    assert benchmark.CPU_SECONDS.keys() == benchmark.BENCHMARKS.keys() == benchmark.TINY.keys()
    default = cli.parse_flags(benchmark.FLAGS, []).benchmark
    assert default == [n for n, t in benchmark.CPU_SECONDS.items() if t <= benchmark.LONG]
    assert "exact_profile" not in default and "train_sort" in default
    named = cli.parse_flags(benchmark.FLAGS, ["--benchmark=exact_profile"]).benchmark
    assert named == ["exact_profile"]


@pytest.mark.full
def test_each_number_of_seeds_is_a_line_of_json(tmp_path, capsys):
    path = tmp_path / "new" / "speed.jsonl"
    arguments = ["--tiny", "--rounds=1", "--benchmark=products,collapse_sweep", "--num_seeds=1,3"]
    assert cli.execute(benchmark.main, benchmark.FLAGS, [*arguments, f"--json={path}"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = ["products", "collapse_sweep, 1 seeds", "collapse_sweep, 3 seeds"]
    assert [line["benchmark"] for line in lines] == names
    assert all(len(case["seconds"]) == 1 for line in lines for case in line["timings"])
    assert lines[0]["figures"].keys() == {"TFLOP/s, float32", "TFLOP/s, bfloat16"}
    assert "jax" in lines[0]["machine"] and "about" not in capsys.readouterr().out


def test_seeds_are_whole_numbers(capsys):
    for text in ("0", "-1", "1.5", "many", "3,,4"):
        assert cli.execute(benchmark.main, benchmark.FLAGS, [f"--num_seeds={text}"]) == 2
        assert "not a whole number of at least 1" in capsys.readouterr().err
    options = SimpleNamespace(num_seeds=["²"], benchmark=[], tiny=False)
    with pytest.raises(ValueError, match="--num_seeds=² is not a whole number of at least 1"):
        list(benchmark.list_benchmarks(options))


def test_the_loss_of_pytorch_is_that_of_the_recipe():
    """A sum of squares over tokens, or the mean cross-entropy of the tokens that exist."""
    torch = pytest.importorskip("torch")
    from experiments.benchmarks import torch_baseline

    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 2, 3, 4)).astype(np.float32)
    labels, mask = rng.integers(4, size=(2, 3)), np.array([[1, 1, 0], [1, 0, 0]], bool)
    surprise = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )

    def compute(loss, *batch):
        task = SimpleNamespace(loss=loss)
        network = lambda inputs, mask=None: inputs  # noqa: E731
        batch = [torch.from_numpy(array) for array in batch]
        return torch_baseline.compute_loss(network, task, *batch).item()

    squares = np.square(logits - targets).sum()
    assert compute("squared_error", logits, targets) == pytest.approx(squares, rel=1e-5)
    assert compute("cross_entropy", logits, labels) == pytest.approx(surprise.mean(), rel=1e-5)
    masked = compute("cross_entropy", logits, labels, mask)
    assert masked == pytest.approx(surprise[mask].mean(), rel=1e-5)


def test_a_figure_that_is_no_number_is_over_its_limit(capsys):
    figures = {"a": (np.nan, 1.0), "b": (np.inf, 1.0), "c": (1.0, 1.0), "d": (np.nan, None)}
    failures = print_report(Report([Timing("a", 0.0, [1.0])], figures))
    assert failures == ["a = nan, limit 1", "b = inf, limit 1"]


def test_the_machine_is_described_before_what_it_measures(monkeypatch, capsys, tmp_path):
    day = time.strptime("2031-04-17", "%Y-%m-%d")
    clock = SimpleNamespace(strftime=lambda form: time.strftime(form, day))
    monkeypatch.setattr(benchmark, "time", clock)

    def measure(options, **sizes):
        return Report([Timing("a", 0.0, [1.0])], {})

    monkeypatch.setattr(benchmark, "BENCHMARKS", {"low": measure, "train_low": measure})
    path = tmp_path / "new" / "speed.jsonl"
    arguments = ["--benchmark=low,train_low", f"--json={path}", "--num_seeds=2,3"]
    assert cli.execute(benchmark.main, benchmark.FLAGS, arguments) == 0
    lines = path.read_text().splitlines()
    names = [json.loads(line)["benchmark"] for line in lines]
    assert names == ["low", "train_low, 2 seeds", "train_low, 3 seeds"]
    device, count = jax.devices()[0], jax.device_count()
    expected = {
        "date": "2031-04-17",
        "device": f"{device.platform} {device.device_kind} x {count}",
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }
    for line in lines:
        machine = json.loads(line)["machine"]
        assert machine.pop("load") >= 0 and machine == expected
    printed = capsys.readouterr().out.splitlines()[0].split(", ")
    assert {f"{name} {value}" for name, value in expected.items()} <= {*printed}
    monkeypatch.chdir(tmp_path)  # a file without a folder is one of this folder
    arguments = ["--benchmark=low", "--json=here.jsonl"]
    monkeypatch.delattr(benchmark.os, "getloadavg")  # as on Windows
    assert cli.execute(benchmark.main, benchmark.FLAGS, arguments) == 0
    machine = json.loads((tmp_path / "here.jsonl").read_text())["machine"]
    assert machine == expected | {"load": None}


def test_each_number_of_seeds_is_a_benchmark_of_those_that_train_seeds(monkeypatch):
    """`seeds` gets all numbers, for each of its networks; what has no seeds runs once."""
    calls = []

    def make_stub(name):
        return lambda options, **settings: calls.append((name, options, settings))

    names = ["seeds", "train_sort", "collapse_sweep", "products"]
    monkeypatch.setattr(benchmark, "BENCHMARKS", {name: make_stub(name) for name in names})
    sizes = {"mlp": ((1, 2), 3), "sort": ((4,), 5)}
    monkeypatch.setattr(benchmark.seed_benchmarks, "SIZES", sizes)
    tiny = {"seeds": {"batch_size": 2}, "products": {"width": 8}}
    monkeypatch.setattr(benchmark, "TINY", tiny)
    for is_tiny in (False, True):
        options = SimpleNamespace(num_seeds=["2", "16"], benchmark=names, tiny=is_tiny)
        calls.clear()
        listed = list(benchmark.list_benchmarks(options))
        for _, _, measure in listed:
            measure("options")
        assert [label for _, label, _ in listed] == [
            *("seeds, mlp", "seeds, sort", "train_sort, 2 seeds", "train_sort, 16 seeds"),
            *("collapse_sweep, 2 seeds", "collapse_sweep, 16 seeds", "products"),
        ]
        assert [name for name, _, _ in listed] == [name for name, _, _ in calls]
        extra = tiny if is_tiny else {}
        networks = {n: benchmark.seed_benchmarks.TINY_SIZE if is_tiny else sizes[n] for n in sizes}
        assert calls == [
            *(
                (
                    "seeds",
                    "options",
                    {"sizes": {n: size}, "num_seeds": [2, 16]} | extra.get("seeds", {}),
                )
                for n, size in networks.items()
            ),
            *((name, "options", {"num_seeds": count}) for name in names[1:3] for count in (2, 16)),
            ("products", "options", extra.get("products", {})),
        ]
    options = SimpleNamespace(num_seeds=[], benchmark=names[1:], tiny=False)
    assert [label for _, label, _ in benchmark.list_benchmarks(options)] == names[1:]


def test_the_time_of_pytorch_is_not_in_the_time_that_is_said(monkeypatch):
    monkeypatch.setattr(benchmark, "CPU_SECONDS", {"train_sort": 20, "products": 2})
    options = SimpleNamespace(tiny=False, baseline="torch")
    about = ", about 20 s of CPU with five rounds"
    assert benchmark.describe_time("train_sort", options) == f"{about}, and PyTorch's"
    assert benchmark.describe_time("products", options) == about.replace("20", "2")
    assert benchmark.describe_time("new", options) == ""
    options = SimpleNamespace(tiny=False, baseline="none")
    assert benchmark.describe_time("train_sort", options) == about
    options.tiny = True
    assert benchmark.describe_time("train_sort", options) == ""
