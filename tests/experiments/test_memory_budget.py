"""How many seeds are computed at a time, and what is said of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import run_path_chains
from experiments.shell import cli
from experiments.shell.memory_budget import Compiled, MemoryBudget, seeds_done
from rank_collapse.runs import seeds
from rank_collapse.runs.files import RunError


def budget_of(gigabytes, said=None):
    """Of two devices; its lines are put into `said`."""
    said = [] if said is None else said
    options = cli.parse(run_path_chains.FLAGS, [f"--memory_gb={gigabytes}"])
    return MemoryBudget(options, seeds.seed_mesh(jax.devices()[:2]), said.append)


@pytest.mark.parametrize(
    ("each", "asked", "tried"),
    [
        (10**7, 16, [16]),
        (10**8, 16, [16, 10]),
        (10**9, 4, [4, 2]),  # one a device at the least, whatever it takes
        (249_999_999, 6, [6, 4]),
        (250_000_001, 4, [4, 2]),  # rounding up to the devices would try 4 again
        (0, 3, [4]),  # padded to the devices
    ],
)
def test_as_many_seeds_at_a_time_as_fit(each, asked, tried):
    sizes = []

    def needed(size):
        sizes.append(size)
        return size * each

    assert budget_of(1).fit(needed, asked) == tried[-1] and sizes == tried


def test_no_more_seeds_than_asked_for_at_a_time():
    assert budget_of(1).fit(lambda size: size, count=16, most=5) == 6  # padded to the devices


def test_the_largest_seeds_are_printed_once(capsys):
    lines = []
    with budget_of(1, lines) as budget:
        for each in (10**7, 10**9, 10**8):
            budget.fit(lambda size, each=each: each * size, 3)
    assert [line.split(" expected ")[0] for line in lines[:3]] == [
        "memory: 0.04 GB", "memory: 2 GB", "memory: 0.4 GB",
    ]  # fmt: skip
    assert capsys.readouterr().err == lines[3] + "\n" and len(lines) == 4
    assert lines[3].startswith("memory: 2 GB expected for 2 of 3 seeds at a time beside ")


def test_nothing_is_printed_where_nothing_was_computed_or_all_failed(capsys):
    with budget_of(1):
        pass
    with pytest.raises(ValueError), budget_of(1) as budget:
        budget.fit(lambda size: size, 2)
        raise ValueError
    assert capsys.readouterr().err == ""


def test_chunks_are_those_of_a_compiled_program():
    """Its bytes are those of its arrays and more; what it gives is in the order of the seeds."""
    budget = budget_of(1e-9)
    program = Compiled(seeds.spread(lambda x, factor: {"y": factor * x}, budget.mesh), budget.mesh)
    x = jnp.arange(15.0).reshape(5, 3)

    def compute(first, count, size):
        own = seeds.lay_out(x[first : first + count], budget.mesh, size)
        return seeds.to_host(program(own, jnp.float32(2)), count)

    needed = []

    def bytes_of(size):
        needed.append(program.needed(jnp.zeros((size, 3)), jnp.float32(2)))
        return needed[-1]

    found = budget.chunks(bytes_of, compute, 5)
    np.testing.assert_array_equal(found["y"], 2 * x)
    arrays = [4 * 2 * 3 * size + 2 * 4 for size in (6, 2)]
    assert len(needed) == 2 and all(n >= a for n, a in zip(needed, arrays, strict=True))


def test_a_function_of_keys_is_mapped_in_their_order():
    budget, keys = budget_of(1e-9), seeds.seed_keys(0, 5)
    found = budget.map(seeds.spread(lambda key, _: jax.random.bits(key), budget.mesh), keys)
    np.testing.assert_array_equal(found, [jax.random.bits(key) for key in keys])


def test_saved_seeds_are_counted_and_cut_arrays_refused(tmp_path):
    part = {"a": np.zeros((2, 3)), "b": np.zeros((2, 3))}
    done = partial(seeds_done, run=tmp_path, part="x")
    assert done(part, 2, shape=(3,)) == 2 and done(None, 2) == 0
    assert done(part | {"b": np.zeros(2)}, 4) == 2
    for cut in (np.zeros((1, 3)), np.array(0.0)):
        with pytest.raises(RunError, match="x is not of 2 seeds"):
            done(part | {"b": cut}, 2)
    with pytest.raises(RunError, match="x is not of 1 seeds"):
        done(part, 1)
    with pytest.raises(RunError, match=r"2 seeds of shape \[4\]"):
        done(part, 2, shape=(4,))
