"""Several processes share the seeds of a sweep."""

import pickle
import socket

import jax
import numpy as np
import pytest

from rank_collapse.training import sweep
from rank_collapse.training.engine import processes
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
