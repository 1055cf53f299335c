"""How experiments run side by side, and how a signal ends them."""

import importlib
import importlib.metadata
import importlib.util
import os
from concurrent import futures

import pytest

from experiments.lab import progress
from experiments.reproducing import running
from experiments.reproducing.running import ProcessResult


def test_how_many_run_side_by_side(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert running.default_jobs() == 2
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ["xla_cuda13"])
    assert running.default_jobs() == 1
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert running.default_jobs() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert running.default_jobs() == 1


def test_what_a_signal_ends_is_counted(monkeypatch):
    """Of two commands one has ended when the signal comes; the other ends because of it."""
    ended = []

    def iterate(executor, work, limit, begun):
        begun |= {executor.submit(*call): name for name, call in work.items()}
        first, second = begun
        futures.wait([first, second])
        yield begun.pop(first), first
        raise progress.Stopped(143)

    monkeypatch.setattr(running.pool, "iterate_ended", iterate)
    monkeypatch.setattr(running, "run_binary", lambda name: ProcessResult(143, name, 1.0, 1.0))
    monkeypatch.setattr(running.pool, "start_workers", futures.ThreadPoolExecutor)
    commands = {"a": ("run_a",), "b": ("run_b",)}
    with pytest.raises(progress.Stopped):
        for name, result in running.run_commands(commands, 2):
            ended.append((name, result.output))
    assert ended == [("a", "run_a"), ("b", "run_b")]


def test_nothing_begins_after_a_signal(monkeypatch):
    """A pool goes on with all that it has been given."""
    begun = []

    def run_binary(name):
        begun.append(name)
        progress._signals_received.append(15)
        return ProcessResult(143, name, 1.0, 1.0)

    monkeypatch.setattr(progress, "_signals_received", [])
    monkeypatch.setattr(running, "run_binary", run_binary)
    monkeypatch.setattr(running.pool, "start_workers", futures.ThreadPoolExecutor)
    commands = {name: (name,) for name in "abcd"}
    with pytest.raises(progress.Stopped):
        list(running.run_commands(commands, 1))
    assert begun == ["a"]
