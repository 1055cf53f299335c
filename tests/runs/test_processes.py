"""What processes exchange, and seeds spread over them: two processes beside one."""

import sys

import jax
import numpy as np
import pytest
from seed_chunks import mapped
from two_processes import run_both

from rank_collapse.runs import processes, seeds


def single(key, scale):
    return {"x": scale * jax.random.normal(key, (3, 3)), "key": jax.random.fold_in(key, 1)}


def in_two_processes(folder):
    """What each of the two does, as a script; see the test."""
    index = jax.process_index()
    own = {
        "float": np.array([-0.0, 1e-45, np.nan, index], np.float64),
        "bool": np.asarray(index == 0),
        "key": jax.random.key(7 + index),
        "none": np.zeros((0, 2), np.int8),
    }
    got = processes.from_primary(own)
    assert got["float"].tobytes() == np.array([-0.0, 1e-45, np.nan, 0], np.float64).tobytes()
    assert got["bool"].dtype == bool and got["bool"] and got["none"].shape == (0, 2)
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(7))).all()
    assert processes.text_from_primary(f"{index}: α" * 3000).startswith("0: α0: α")
    assert processes.text_from_primary("" if index == 0 else "x") == ""
    assert processes.same_everywhere("a") and not processes.same_everywhere(str(index))
    assert processes.is_primary() == (index == 0)

    keys = seeds.seed_keys(3, 5)
    mesh = seeds.seed_mesh()
    assert mesh.size == 2 and len(jax.local_devices()) == 1
    for chunk in (0, 2):
        found = mapped(single, keys, 0.5, mesh=mesh, chunk=chunk)
        np.savez(f"{folder}/{index}-{chunk}.npz", x=found["x"], key=plain(found["key"]))
    # What came to the host goes back over the mesh, padded again.
    again = seeds.to_host(seeds.lay_out(found, mesh), 5)
    np.testing.assert_array_equal(again["x"], found["x"])
    np.testing.assert_array_equal(plain(again["key"]), plain(found["key"]))


def plain(keys):
    return np.asarray(jax.random.key_data(keys))


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path):
    for code, _, err in run_both(__file__, str(tmp_path)):
        assert code == 0, err[-2000:]
    for chunk in (0, 2):
        here = mapped(single, seeds.seed_keys(3, 5), 0.5, chunk=chunk)
        for index in (0, 1):
            with np.load(tmp_path / f"{index}-{chunk}.npz") as there:
                np.testing.assert_array_equal(there["x"], here["x"])
                np.testing.assert_array_equal(there["key"], plain(here["key"]))


def test_alone_a_process_hears_itself():
    tree = {"a": np.ones(2)}
    assert processes.from_primary(tree) is tree and processes.is_primary()
    assert processes.text_from_primary("x" * 5000) == "x" * 5000
    assert processes.same_everywhere("anything")


if __name__ == "__main__":
    from experiments.shell import several

    several.join()
    jax.config.update("jax_num_cpu_devices", 1)
    in_two_processes(sys.argv[1])
