"""Sweeps that are interrupted or killed anywhere, and resumed, are whole."""

import functools
import itertools
import signal
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.runs import memory
from rank_collapse.runs.seeds import seed_mesh
from rank_collapse.training import sweep
from rank_collapse.training.engine import trainer
from rank_collapse.training.engine.program import Program
from rank_collapse.training.engine.trainer import MOST_NAMED
from tests.oracles.small_sweeps import run, with_static
from tests.oracles.swept_networks import (
    PROGRAM,
    WHOLE,
    assert_same_bits,
    assert_same_files,
    init,
    start,
    step,
)
from tests.support.processes import LIMIT


class Interrupted(BaseException):
    pass


def test_interrupted_anywhere_and_resumed_is_whole(whole, tmp_path, monkeypatch):
    """After each chunk of each group, on one and two devices in turn."""
    advance, calls = Program.advance, []

    def interrupt(self, *arguments):
        if calls:
            raise Interrupted
        calls.append(1)
        return advance(self, *arguments)

    monkeypatch.setattr(Program, "advance", interrupt)
    for turn in range(12):
        calls.clear()
        mesh = seed_mesh(jax.devices()[: 1 + turn % 2])
        try:
            resumed = sweep(init, step, **WHOLE | {"folder": tmp_path, "mesh": mesh})
        except Interrupted:
            continue
        break
    assert turn == 5  # two groups of three chunks
    assert_same_bits(resumed, whole)
    paths = list(tmp_path.glob("runs/*"))
    assert [p.suffix for p in paths] == [".npz"] * 2
    for path in paths:  # no look is repeated where a run goes on
        assert np.load(path)["look_steps"].tolist() == [0, 10, 20, 25]


def test_progress_shows_the_median_of_a_number_over_finite_runs(capsys):
    """The loss, or else the first that is one number with a fraction; of counts there is none."""

    def begin(key, hyper):
        return {"a": hyper["at"]}

    def show(state, hyper, index, name="loss"):
        a = jnp.where(hyper["at"] > 8, jnp.nan, 10.0 * hyper["at"])
        a = a.astype(jnp.bfloat16) if name == "b" else a
        metrics = {"by_layer": jnp.ones(2), "count": index, "zz": a + 0.5, name: a}
        metrics |= {"accuracy": a / 50} if name == "loss" else {}
        return state, metrics if name != "zz" else {"by_layer": jnp.ones(2), "count": index}

    for name, shown in (("loss", ", loss 30, "), ("b", ", b 30, "), ("zz", " 0.")):
        values = {"at": [1.0, 3.0, 4.0, 9.0]}
        fn = functools.partial(show, name=name)
        sweep(begin, fn, steps=2, seeds=1, hyper=values, finite=[] if name == "zz" else [name])
        last = capsys.readouterr().err.splitlines()[-1]
        assert (
            last.startswith("sweep: 100%")
            and shown in last
            and ("loss" in last) is (name == "loss")
        )


@pytest.mark.parametrize("more", [0, 2])
def test_of_many_runs_that_stop_the_first_are_named(more, capsys):
    """Runs that are not finite any more; the others are counted."""

    def begin(key, hyper):
        return {"x": hyper["x"]}

    def advance(state, hyper, index):
        return state, {"x_now": jnp.where(state["x"] < 0.0, jnp.nan, 1.0)}

    values = [1.0, *range(-MOST_NAMED - more, 0)]
    sweep(begin, advance, steps=1, seeds=1, hyper={"x": values})
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if "keeps its state" in line]
    assert len(named) == MOST_NAMED and f"(x={float(values[1])})" in named[0]
    assert [line for line in lines if " more runs" in line] == [f"sweep: and {more} more runs"][
        :more
    ]


@pytest.mark.full
def test_killed_twenty_times_it_is_whole(tmp_path):
    """By SIGKILL and Ctrl-C, at random moments, on one and two devices in turn."""
    folder, kills, rng = tmp_path / "run", 0, np.random.default_rng(0)

    def list_files():
        return {(p, p.stat().st_mtime_ns) for p in folder.glob("runs/*.npz") if p.exists()}

    with open(tmp_path / "errors", "w+") as errors:
        assert start(errors, PROGRAM, 2, "", tmp_path / "whole", 0).wait(LIMIT) == 0
        while True:
            before = list_files()
            pause = 0.05 if kills < 20 else 0  # a busy machine, too, kills before the end
            process = start(errors, PROGRAM, 1 + kills % 2, folder, tmp_path / "parts", pause)
            # One in four while it starts, compiles or computes; others around a snapshot.
            end = time.monotonic() + (rng.uniform(0, 6) if kills % 4 == 3 else LIMIT)
            while process.poll() is None and (
                kills >= 20 or (time.monotonic() < end and list_files() <= before)
            ):
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.02))
            if process.poll() is None:
                process.send_signal((signal.SIGKILL, signal.SIGINT)[kills % 4 // 2])
            try:
                code = process.wait(10)
            except subprocess.TimeoutExpired:  # an import can lose a Ctrl-C
                process.kill()
                code = process.wait(LIMIT)
            if code == 0:
                break
            kills += 1
            assert kills <= 20, (tmp_path / "errors").read_text()[-2000:]
    assert kills == 20
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def test_static_values_are_counted_and_timed_together(monkeypatch, capsys):
    """Progress counts the steps of all of them, and the seconds of each are added."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(trainer, "time", clock)  # a second passes from each look at it to the next
    seconds = {}
    for sizes in ([1], [1, 2, 3]):
        result = run(**with_static(size=sizes), quiet=False)
        seconds[len(sizes)] = result.seconds
        lines = [line for line in capsys.readouterr().err.splitlines() if "%" in line]
        assert lines[-1].startswith("sweep: 100%"), lines
    assert seconds[1]["running"] > 0
    assert seconds[3] == {name: 3 * value for name, value in seconds[1].items()}


def test_runs_that_begin_are_shared_out_where_fewer_fit(monkeypatch):
    options = {"seeds": 3, "mesh": seed_mesh(jax.devices()[:1]), "at_once": 1}
    whole = run(steps=3, **options)
    monkeypatch.setattr(
        memory, "compile_largest", lambda compile_size, size, least, mesh: (compile_size(2), 2)
    )
    parts = run(steps=3, **options)
    np.testing.assert_array_equal(parts.metrics["loss"], whole.metrics["loss"])
    np.testing.assert_array_equal(parts.states["w"], whole.states["w"])


def test_runs_that_go_on_are_shared_out_where_fewer_fit_and_are_counted(
    tmp_path, monkeypatch, capsys
):
    """Eight runs that are half done go on in groups of two, of which none is left out."""
    options = {"seeds": 4, "mesh": seed_mesh(jax.devices()[:1]), "at_once": 1}
    whole = run(steps=4, **options)
    run(steps=2, folder=tmp_path, **options)
    monkeypatch.setattr(
        memory, "compile_largest", lambda compile_size, size, least, mesh: (compile_size(2), 2)
    )
    resumed = run(steps=4, folder=tmp_path, **options | {"quiet": False})
    np.testing.assert_array_equal(resumed.metrics["loss"], whole.metrics["loss"])
    np.testing.assert_array_equal(resumed.states["w"], whole.states["w"])
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "%" in line][-1].startswith("sweep: 100%")
