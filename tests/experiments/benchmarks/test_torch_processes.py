"""Processes of the PyTorch baseline: how many, and one that fails."""

import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.benchmarks import torch_processes, training_benchmarks
from rank_collapse.training import Hyper
from rank_collapse.training.tasks.examples import Examples


@pytest.mark.parametrize(
    ("cores", "ways"),
    [
        (1, [(1, 1, 0), (1, 1, 6)]),
        (2, [(1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 2, 6), (2, 1, 3)]),
        (6, [(1, 1, 0), (1, 6, 0), (2, 3, 0), (4, 1, 0), (6, 1, 0), (1, 6, 6), (6, 1, 1)]),
    ],
)
def test_ways_of_pytorch_fill_the_cores(cores, ways):
    listed = torch_processes.list_ways(cores, 6)
    assert [(way.processes, way.threads, way.stacked) for way in listed] == ways
    assert all(way.processes * way.threads <= cores for way in listed)
    for count, processes in ((16, 4), (4, 4), (3, 3)):  # as many as share a GPU, or as the cores
        listed = torch_processes.list_ways(count, 6, "gpu")
        sizes = [(way.processes, way.threads, way.stacked) for way in listed]
        assert sizes == [(1, 1, 0), (processes, 1, 0), (1, 1, 6)]


def test_a_way_is_named_by_its_processes_threads_and_seeds():
    names = {
        (1, 1, 0): ("1 process of 1 thread", 1),
        (2, 1, 0): ("2 processes of 1 thread", 2),
        (1, 4, 6): ("1 process of 4 threads, torch.func of 6 seeds", 6),
        (3, 2, 2): ("3 processes of 2 threads, torch.func of 2 seeds", 6),
    }
    for sizes, (name, count) in names.items():
        way = torch_processes.Way(*sizes)
        assert (way.name, way.seeds) == (f"PyTorch, {name}", count)


def test_seconds_are_of_the_slowest_process_for_each_of_all_seeds():
    """Of three processes two are used, and all of them begin before one is waited for."""
    order, answers = [], [b"6.0\n", b"12.0\n", b""]

    class Pipe:
        def __init__(self, number):
            self.number = number

        def write(self, data):
            order.append((self.number, data))

        def flush(self):
            pass

        def readline(self):
            order.append((self.number, "read"))
            return answers[self.number]

    processes = torch_processes.Processes.__new__(torch_processes.Processes)
    processes._processes = [SimpleNamespace(stdin=Pipe(i), stdout=Pipe(i)) for i in range(3)]
    way = torch_processes.Way(2, 1, 3)
    assert processes.measure(way, 4) == 12.0 / 4 / 6
    line = b"1 3 4\n"
    assert order == [(0, line), (1, line), (0, "read"), (1, "read")]
    with pytest.raises(RuntimeError, match="3 processes of 1 thread failed"):
        processes.measure(torch_processes.Way(3, 1), 1)


def test_processes_of_pytorch_are_silent_whatever_the_caller_has_set(monkeypatch):
    """Each gets the task; other variables of the caller are kept, and all processes are ended."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("ANOTHER", "kept")
    started, ended = [], []

    def start(command, env, **_):
        started.append((env["PYTHONWARNINGS"], env["ANOTHER"]))
        return SimpleNamespace(stdin=io.BytesIO())

    monkeypatch.setattr(torch_processes.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch_processes.subprocess, "Popen", start)
    monkeypatch.setattr(torch_processes, "_stop", ended.append)
    task = SimpleNamespace(device="cpu")
    with torch_processes.Processes(task, 3) as processes:
        tasks = [pickle.loads(p.stdin.getvalue()) for p in processes._processes]
        assert started == [("ignore", "kept")] * 3 and tasks == [task] * 3 and not ended
    assert len({id(process) for process in ended}) == 3


def test_a_process_of_pytorch_that_fails_ends_the_benchmark(capfd):
    pytest.importorskip("torch")
    way = torch_processes.Way(1, 1)
    processes = torch_processes.Processes(SimpleNamespace(device="cpu", arrays=[]), 1)
    with processes, pytest.raises(RuntimeError, match=r"1 process of 1 thread failed|has ended"):
        processes.measure(way, 1)
    assert "Error" in capfd.readouterr().err


def test_pytorch_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(torch_processes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs PyTorch, which is not installed: pip install"):
        torch_processes.Processes(None, 1)


@pytest.mark.parametrize(("platform", "device"), [("gpu", "cuda"), ("cpu", "cpu")])
def test_a_task_is_plain_values_of_the_recipe(platform, device):
    """Labels that are numbers stay, classes are whole numbers; a mask is there where texts end."""
    recipe, _, batch_size = training_benchmarks.make_case("sort", training_benchmarks.TINY)
    assert batch_size == recipe.batch_size == 4  # of the flags
    hyper = Hyper(learning_rate=1e-3, dropout=0.1, weight_decay=0.25)
    inputs = np.arange(6).reshape(2, 3)
    for labels, mask in (
        (np.array([[1, 2, 0], [2, 0, 1]], np.int8), None),
        (np.array([[0.5, 1.5, 2.5]] * 2, np.float32), np.array([[True, True, False]] * 2)),
    ):
        examples = Examples(inputs, labels, mask)
        task = torch_processes.describe_task(recipe, examples, hyper, platform)
        expected = [inputs, labels, *([] if mask is None else [mask])]
        for array, wanted in zip(task.arrays, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)
        assert task.arrays[1].dtype == (int if mask is None else np.float32)
        assert task.device == device and (task.batch_size, task.dropout) == (4, 0.1)
        assert (task.learning_rate, task.weight_decay) == (1e-3, 0.25)
        assert (task.config.depth, task.config.num_heads, task.config.d_model) == (1, 2, 8)
        assert task.config.embedding.vocab_size == recipe.num_outputs == task.num_outputs


def test_every_field_of_a_task_is_that_of_the_recipe():
    embedding = SimpleNamespace(
        vocab_size=0, d_input=3, d_embed=5, positions="none", num_positions=7, hidden_layer=True
    )
    sizes = {"depth": 2, "num_heads": 4, "d_model": 8, "mlp": "gelu"}
    fields = {"num_outputs": 6, "batch_size": 9, "shuffle": False, "loss": "squared_error"}
    fields["clip_norm"] = 0.5
    recipe = SimpleNamespace(config=SimpleNamespace(embedding=embedding, **sizes), **fields)
    examples = Examples(np.zeros((2, 3)), np.zeros((2, 3)), None)
    task = torch_processes.describe_task(recipe, examples, Hyper(learning_rate=1e-3, dropout=0.1))
    assert vars(task.config.embedding) == vars(embedding)
    assert {name: getattr(task.config, name) for name in sizes} == sizes
    assert {name: getattr(task, name) for name in fields} == fields


def test_a_process_is_ended_before_its_pipes_are_closed():
    """A pipe that holds what the process did not read may be broken."""
    order = []

    def fail():
        order.append("stdin")
        raise BrokenPipeError

    torch_processes._stop(
        SimpleNamespace(
            kill=lambda: order.append("kill"),
            wait=lambda: order.append("wait"),
            stdout=SimpleNamespace(close=lambda: order.append("stdout")),
            stdin=SimpleNamespace(close=fail),
        )
    )
    assert order == ["kill", "wait", "stdout", "stdin"]
