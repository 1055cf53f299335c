"""A float that --sweep varies is a cell of the executor, in each experiment that traces it."""

import copy

import numpy as np
import pytest
from trained_runs import arrays, parsed

from experiments import run_stability, run_trainability
from experiments.shell.flag_values import Group
from rank_collapse.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("binary", "more", "flag", "values"),
    [
        (run_stability, ("--designs=post",), "update_size", (1e-3, 1e-2)),
        (run_trainability, ("--parts=designs", "--designs=post"), "learning_rate", (1e-3, 1e-2)),
    ],
    ids=lambda own: getattr(own, "__name__", ""),
)
def test_runs_of_a_sweep_are_as_they_would_be_alone(binary, more, flag, values, tmp_path):
    """The first computes the cells of both: the second only reads them."""
    own, tiny = binary.EXPERIMENT, binary.EXPERIMENT.runs("tiny")[""]
    assert flag in own.flags.traced

    def measured(options, name):
        with RunFolder(tmp_path / name, {}) as run:
            own.measure(options, own.setup(options), run)
            return {n: a for n, a in run.arrays.items() if "seconds" not in n}

    def options_of(value):
        return copy.deepcopy(parsed(binary, *tiny, *more, f"--{flag}={value}"))

    members = [options_of(value) for value in values]
    for member in members:
        member.join(Group(tmp_path / "group", members))
    first, second = (measured(member, str(i)) for i, member in enumerate(members))
    cells = {name.split("/cell ")[1][0] for name in arrays(tmp_path / "group")}
    assert cells == {"1", "2"}
    alone = measured(options_of(values[1]), "alone")
    assert second.keys() == alone.keys()
    for name, array in alone.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)
    changed = [n for n in first.keys() & second.keys() if not np.array_equal(first[n], second[n])]
    assert changed or first.keys() != second.keys()
