"""How many seeds are computed at a time, and what is said of it."""

import re

import jax
import pytest

from experiments import run_path_chains
from experiments.shell import cli, memory
from experiments.shell.memory import MemoryBudget
from rank_collapse.runs import seeds


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


def test_what_no_memory_holds_is_refused(monkeypatch):
    """It was begun, and killed by the system without a line."""
    monkeypatch.setattr(memory, "free", lambda: 3 * 10**9)
    assert budget_of(1).fit(lambda size: size * 10**9, 4) == 2  # above the budget, not above that
    with pytest.raises(ValueError, match=r"2 seeds at a time, the fewest, take 4 GB .* 3 GB are f"):
        budget_of(1).fit(lambda size: size * 2 * 10**9, 4)


def test_no_more_seeds_than_asked_for_at_a_time():
    assert budget_of(1).fit(lambda size: size, count=16, most=5) == 6  # padded to the devices


def test_a_budget_that_the_fewest_seeds_do_not_fit_is_warned_of(capsys):
    lines = []
    assert budget_of(1e-9, lines).fit(lambda size: size * 10**7, 16) == 2
    said = "warning: 0.02 GB expected for 2 of 16 seeds at a time, the fewest, are more than the"
    assert lines[0] == f"{said} budget of 1e-09 GB" and capsys.readouterr().err == f"{lines[0]}\n"
    assert budget_of(1).fit(lambda size: size * 10**7, 16) == 16
    assert capsys.readouterr().err == ""


def test_nothing_is_printed_where_nothing_was_computed_or_all_failed(capsys):
    with budget_of(1):
        pass
    with pytest.raises(ValueError), budget_of(1) as budget:
        budget.fit(lambda size: size, 2)
        raise ValueError
    assert capsys.readouterr().err == ""


def test_what_the_seeds_took_is_said_at_the_end(capsys):
    """What was used is no less than a process."""
    with budget_of(1e-9) as budget:
        budget.fit(lambda size: size * 10**7, 16)
    line = r"memory: 0\.02 GB expected for (\d+) of (\d+) seeds at a time beside \S+ GB, "
    line += r"a budget of 1e-09 GB; at most (\S+) GB in use"
    *seeds, peak = re.search(line, capsys.readouterr().err).groups()
    assert seeds == ["2", "16"] and 0.1 < float(peak) < 1000
