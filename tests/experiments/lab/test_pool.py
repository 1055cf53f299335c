"""Work of several processes: order, limits, signals, and names of experiments."""

import threading
import time
from concurrent import futures

import pytest

from experiments.lab import pool, progress
from rank_collapse.runs.files import RunError
from tests.support.refusals import is_refused


def square(number):
    return number * number


def test_all_work_ends_and_no_more_than_the_limit_runs():
    counts, running, lock, most = [0], {}, threading.Lock(), []

    def work(number):
        with lock:
            counts[0] += 1
            most.append(counts[0])
        time.sleep(0.02)
        with lock:
            counts[0] -= 1
        return number

    with futures.ThreadPoolExecutor(4) as executor:
        tasks = {i: (work, i) for i in range(6)}
        results = {n: f.result() for n, f in pool.iterate_ended(executor, tasks, 2, running)}
    assert results == {i: i for i in range(6)} and max(most) <= 2 and not running


def test_a_signal_ends_it_before_more_work_begins(monkeypatch):
    class Stopped(Exception):
        pass

    def stop():
        raise Stopped

    monkeypatch.setattr(progress, "raise_if_stopped", stop)
    running = {}
    with futures.ThreadPoolExecutor(1) as executor, pytest.raises(Stopped):
        list(pool.iterate_ended(executor, {0: (square, 0)}, 1, running))
    assert not running


def test_a_worker_that_fails_gives_its_error_to_the_parent():
    with futures.ThreadPoolExecutor(1) as executor:
        ((name, future),) = pool.iterate_ended(executor, {"a": (square, "a")}, 1, {})
        assert name == "a" and isinstance(future.exception(), TypeError)


def test_workers_that_are_killed_are_said_to_be():
    with pytest.raises(RunError, match="a worker process was killed"), pool.start_workers(1):
        raise futures.process.BrokenProcessPool


def test_the_module_of_an_experiment_has_its_name():
    assert pool.module_name("sort") == "experiments.run_sort"
    assert pool.module_name("check_bounds") == "experiments.check_bounds"
    for name in ("none", "reproduce", "lab"):
        is_refused(f"'{name}' is not the name of an experiment", pool.module_name, name)
