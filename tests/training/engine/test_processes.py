"""Several processes share the seeds of a sweep."""

import pickle
import socket

import pytest

from rank_collapse.training import sweep
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
