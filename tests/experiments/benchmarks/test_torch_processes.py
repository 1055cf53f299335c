"""Processes of the PyTorch baseline: how many, and one that fails."""

from types import SimpleNamespace

import pytest

from experiments.benchmarks import torch_processes


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
    assert [way.stacked for way in torch_processes.list_ways(16, 6, "gpu")] == [0, 0, 6]


def test_a_process_of_pytorch_that_fails_ends_the_benchmark(capfd):
    pytest.importorskip("torch")
    way = torch_processes.Way(1, 1)
    processes = torch_processes.Processes(SimpleNamespace(device="cpu", arrays=[]), 1)
    with processes, pytest.raises(RuntimeError, match=r"1 process of 1 thread failed|has ended"):
        processes.measure(way, 1)
    assert "Error" in capfd.readouterr().err
