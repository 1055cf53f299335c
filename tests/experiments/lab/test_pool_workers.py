"""Workers of a pool: their beginning and end, signals, and how many work at a time."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import pytest

from experiments.lab import pool, progress
from rank_collapse.runs.files import RunError


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


def test_a_worker_notes_a_signal_and_searches_seldom_for_unreachable_objects():
    with pool.start_workers(1) as workers:
        handler = pool.submit_work(workers, signal.getsignal, signal.SIGTERM)
        thresholds = pool.submit_work(workers, gc.get_threshold)
        assert handler.result() is progress.note_signal
        assert thresholds.result()[0] == 10_000


def test_a_worker_ends_when_its_parent_does(monkeypatch):
    sentinel, parent = os.pipe()
    has_ended, codes = threading.Event(), []

    def end(code):
        codes.append(code)
        has_ended.set()

    process = SimpleNamespace(sentinel=sentinel)
    monkeypatch.setattr(pool.multiprocessing, "parent_process", lambda: process)
    monkeypatch.setattr(pool.os, "_exit", end)
    for module, name in ((pool.gc, "set_threshold"), (pool.signal, "signal")):
        monkeypatch.setattr(module, name, lambda *arguments: None)
    pool.begin_worker()
    assert not has_ended.wait(timeout=0.05)
    os.close(parent)
    assert has_ended.wait(timeout=20) and codes == [1]
    os.close(sentinel)


def test_workers_that_are_killed_are_said_to_be():
    with pytest.raises(RunError, match="a worker process was killed"), pool.start_workers(1):
        raise futures.process.BrokenProcessPool


@pytest.mark.parametrize("earlier", [None, "error"])
def test_the_resource_tracker_starts_without_warnings(earlier, monkeypatch):
    seen = []
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    if earlier is not None:
        monkeypatch.setenv("PYTHONWARNINGS", earlier)
    monkeypatch.setattr(
        pool.resource_tracker, "ensure_running", lambda: seen.append(os.environ["PYTHONWARNINGS"])
    )
    pool.start_resource_tracker()
    silent = "ignore:resource_tracker:UserWarning"
    assert seen == [silent if earlier is None else f"error,{silent}"]
    assert os.environ.get("PYTHONWARNINGS") == earlier


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, None),
        (TimeoutError("no answer in 10 s"), "no answer in 10 s"),
        (futures.CancelledError(), "the scheduler or its workers were lost"),
        (ValueError("bad address"), "bad address"),
    ],
)
def test_the_workers_of_a_scheduler_are_used_and_its_loss_is_said(error, reason, monkeypatch):
    calls = []

    class Client(contextlib.nullcontext):
        def __init__(self, address, timeout):
            super().__init__(self)
            calls.append((address, timeout))

        def get_executor(self, pure):
            calls.append(pure)
            if error:
                raise error
            return "its workers"

    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=Client))
    expected = contextlib.nullcontext()
    if error:
        expected = pytest.raises(RunError, match=f"^--scheduler=tcp://here: {reason}$")
    with expected, pool.start_workers(2, "tcp://here") as workers:
        assert workers == "its workers"
    assert calls == [("tcp://here", 10), False]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_workers_are_ended_before_they_are_waited_for_once_a_signal_came(is_stopped, monkeypatch):
    """New processes compute with one thread each, unless the environment says otherwise."""
    events, started = [], []
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    if is_stopped:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    process = SimpleNamespace(terminate=lambda: events.append("ended"))
    workers = SimpleNamespace(shutdown=lambda cancel_futures: events.append(cancel_futures))
    monkeypatch.setattr(
        pool.futures, "ProcessPoolExecutor", lambda *arguments: started.append(arguments) or workers
    )
    monkeypatch.setattr(pool.multiprocessing, "active_children", lambda: [process, process])
    monkeypatch.setattr(pool.progress, "stop_requested", lambda: is_stopped)
    with pool.start_workers(2):
        pass
    assert events == [*["ended"] * (2 * is_stopped), True]
    ((jobs, context, begin),) = started
    assert (jobs, context.get_start_method(), begin) == (2, "spawn", pool.begin_worker)
    assert os.environ["OPENBLAS_NUM_THREADS"] == ("1" if is_stopped else "3")


def test_a_signal_counts_before_the_loss_of_the_workers_that_it_ended(monkeypatch):
    workers = SimpleNamespace(shutdown=lambda cancel_futures: None)
    monkeypatch.setattr(pool.futures, "ProcessPoolExecutor", lambda *arguments: workers)
    monkeypatch.setattr(progress, "_signals_received", [signal.SIGTERM])
    monkeypatch.setattr(pool.multiprocessing, "active_children", list)
    with pytest.raises(progress.Stopped), pool.start_workers(1):
        raise futures.process.BrokenProcessPool


def test_processes_begin_while_ctrl_c_is_blocked(monkeypatch):
    """The resource tracker, which would unblock it, runs before; the parent has it again."""
    events, before = [], signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def submit(work, *arguments):
        events.append("submitted")
        return work(*arguments), signal.pthread_sigmask(signal.SIG_BLOCK, [])

    monkeypatch.setattr(pool.resource_tracker, "ensure_running", lambda: events.append("tracker"))
    result, blocked = pool.submit_work(SimpleNamespace(submit=submit), square, 3)
    assert result == 9 and blocked == before | {signal.SIGINT}
    assert events == ["tracker", "submitted"]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_signal_ends_it_while_the_work_goes_on(monkeypatch):
    """The parent looks for signals several times a second, and yields no result after one."""
    looks, is_over = [], threading.Event()

    def stop():
        looks.append(len(looks))
        if len(looks) == 2:
            raise InterruptedError

    monkeypatch.setattr(progress, "raise_if_stopped", stop)
    with futures.ThreadPoolExecutor(1) as executor:
        with pytest.raises(InterruptedError):
            list(pool.iterate_ended(executor, {0: (is_over.wait, 2)}, 1, {}))
        is_over.set()
