"""Several processes share the seeds of a sweep."""

import pickle
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.training import sweep
from rank_collapse.training.engine import processes
from rank_collapse.training.engine.runs import Runs, join_pieces
from tests.oracles.small_sweeps import run
from tests.oracles.swept_networks import (
    WHOLE,
    assert_same_files,
    init,
    list_leaves,
    start,
    step,
)
from tests.support.processes import LIMIT

TWO = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from rank_collapse.training import sweep
from rank_collapse.training.engine import processes
from tests.oracles.swept_networks import WHOLE, init, list_leaves, step
import pickle
rule = lambda metrics: metrics.sizes["seed"] >= 5
options = WHOLE | {"folder": sys.argv[3], "seeds": 7, "until": rule, "round_seeds": 3}
result = sweep(init, step, **options)
pickle.dump(list_leaves(result), open(sys.argv[4] + sys.argv[2], "wb"))
"""


@pytest.mark.full
def test_processes_share_the_seeds(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with open(tmp_path / "errors", "w+") as errors:
        paths = tmp_path / "run", tmp_path / "out"
        started = [start(errors, TWO, port, i, *paths) for i in range(2)]
        codes = [process.wait(LIMIT) for process in started]
    assert codes == [0, 0], (tmp_path / "errors").read_text()[-2000:]
    with open(tmp_path / "out", "wb") as file:
        pickle.dump(list_leaves(sweep(init, step, **WHOLE | {"seeds": 6})), file)
    for i in range(2):
        assert_same_files(tmp_path / f"out{i}", tmp_path / "out")


def test_runs_are_gathered_from_all_processes_with_their_dtypes(monkeypatch):
    """Those of a smaller share are repeated to one size; runs of one process are as they are."""
    from jax.experimental import multihost_utils

    def make_runs(seeds):
        """Two runs of each seed, in pieces of metrics; 64 bits and flags among the arrays."""
        seeds = np.repeat(seeds, 2)
        points = np.tile([0, 1], len(seeds) // 2)
        metrics = [[seeds[:, None] + np.array([0.25]), seeds[:, None] + np.array([0.5, 0.75])]]
        metrics.append([np.repeat(points[:, None] == 1, 3, axis=1)])
        looks = [[np.stack([seeds, points], axis=1)[:, None].astype(np.float16)]]
        looks.append([seeds[:, None].astype(np.int8)])
        state = [seeds.astype(np.int64) * 2**40, np.stack([seeds, points], 1).astype(np.float32)]
        state += [np.zeros((len(seeds), 0, 3), np.float32)]
        return Runs(points, seeds, 3, state, metrics, looks, [], seeds - 11, seeds[:, None] > 11)

    alone = make_runs(np.array([10, 11, 12]))
    assert processes.gather(alone, 3) is alone
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    shares = [make_runs(np.array([10, 12])), make_runs(np.array([11]))]
    sent = [[], []]

    def send(raw, to):
        to.append(np.array(raw))
        return np.stack([raw, raw])

    for runs, arrays in zip(shares, sent, strict=True):
        monkeypatch.setattr(
            multihost_utils, "process_allgather", lambda raw, arrays=arrays: send(raw, arrays)
        )
        processes.gather(runs, 3)
    assert {a.dtype for arrays in sent for a in arrays} == {np.dtype(np.uint8)}
    both = [np.stack(pair) for pair in zip(*sent, strict=True)]  # of one size
    for runs in shares:
        answers = iter(both)
        monkeypatch.setattr(
            multihost_utils, "process_allgather", lambda raw, answers=answers: next(answers)
        )
        gathered = processes.gather(runs, 3)
        expected = make_runs(np.array([10, 12, 11]))
        assert gathered.step == 3 and gathered.names()[:6] == expected.names()
        assert {*gathered.names()[6:]} <= {*expected.names()}
        assert [len(pieces) for pieces in (*gathered.metrics, *gathered.looks)] == [1] * 4
        for name in ("points", "seeds", "finite_steps", "exempt", "state", "metrics", "looks"):
            ours, theirs = (getattr(r, name) for r in (gathered, expected))
            if name in ("metrics", "looks"):
                ours, theirs = ([join_pieces(p) for p in a] for a in (ours, theirs))
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a[: len(b)], b)


def test_the_first_process_alone_says_notes(monkeypatch, capsys):
    options = {"init": lambda key, hyper: {"w": jnp.ones(3)}, "steps": 0, "quiet": False}
    for index, is_said in ((0, True), (1, False)):
        monkeypatch.setattr(processes, "is_first", lambda index=index: index == 0)
        run(**options)
        assert bool(capsys.readouterr().err) is is_said


def test_every_seed_is_in_one_share_and_shares_have_one_size(monkeypatch):
    """The last seed is repeated where the number does not divide."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for count in (3, 7, 8):
        numbers, shares = np.arange(10, 10 + count), []
        for index in range(3):
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            shares.append(processes.take_share(numbers))
            assert processes.is_first() == (index == 0)
            assert processes.count_share(count) - len(shares[-1]) in (0, 1)
        np.testing.assert_array_equal(np.unique(np.concatenate(shares)), numbers)
