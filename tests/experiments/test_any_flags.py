"""Any flags of any binary: done, or one line and exit 2, and never a traceback.

    RANK_COLLAPSE_CASES=1000 python -m pytest -n 0 -s -m "" tests/experiments/test_any_flags.py

draws as many cases for each binary (a few by default) and prints how many there were. In the usual
run a case ends where it would open its folder, when flags, networks, data and sweeps have been
checked; another computes what the flags ask for, at small sizes.
"""

import importlib
import os
import signal
import tempfile

import jax
import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st
from marks import full_if

from experiments import benchmark, reproduce
from experiments.lab import cli, experiment
from experiments.lab.experiment import describe_experiment

pytestmark = pytest.mark.full

CASES = int(os.environ.get("RANK_COLLAPSE_CASES", "0"))
LIMIT = 300  # seconds, far above what comes before the computation: a hang fails
BINARIES = [*reproduce.EXPERIMENTS, "reproduce", "benchmark"]
# They start processes, wait for others, or show tracebacks on purpose.
LEFT_ALONE = {
    "output_dir",
    "distributed",
    "debug",
    "workers",
    "docs",
    "json",
    "suite",
    "compile_for",
}
ODD = (
    "",
    " ",
    "-",
    "a",
    "é",
    "0",
    "-1",
    "1e400",
    "nan",
    "None",
    "[1]",
    "1:2",
    "/nonexistent",
    "/dev/null",
    "../x",
    "x\0y",
    "x" * 300,
    "a,b",
    ",",
    "=",
    ";",
)
WHOLE = (-(10**20), -1, 0, 1, 2, 3, 7, 64, 10**6, 10**20)
SMALL = (0, 1, 2, 3)
FRACTIONS = (-1.0, 0.0, 1e-320, 1e-30, 0.3, 1.0, 2.0, 1e30, 1e308)


class Reached(Exception):
    """Where the computation would begin."""


def value_of(flag, whole):
    """What one value of a flag may be, and what it may not."""
    kind, odd = flag.flag_type(), st.sampled_from(ODD)
    values = {"bool": ("true", "false"), "int": whole, "float": FRACTIONS}
    one = getattr(flag.parser, "enum_values", None) or values.get(kind)
    if one:
        return st.sampled_from(one).map(str) | odd
    known = flag.default if isinstance(flag.default, list) else []
    several = whole if kind == "numbers" else [*known, *whole[:4], 1e-3]
    own = st.sampled_from(several).map(str)
    return st.lists(own if kind == "numbers" else own | odd, max_size=3).map(",".join) | odd


@st.composite
def arguments(draw, values, whole):
    """Some flags of a binary with values, one of them perhaps swept."""
    names = [n for n in values if values[n].name == n and n not in LEFT_ALONE]
    chosen = draw(st.lists(st.sampled_from(sorted(names)), max_size=4, unique=True))
    given_ = [f"--{name}={draw(value_of(values[name], whole))}" for name in chosen]
    if "sweep" in values and draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(names)))
        points = draw(st.lists(value_of(values[name], whole), min_size=1, max_size=2))
        given_.append(f"--sweep={name}={','.join(points)}")
    return given_


def check(module, given_):
    """Runs a binary; what came of it."""

    def too_long(*_):
        raise AssertionError(f"more than {LIMIT} s: {given_}")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            code = cli.execute(module.main, module.FLAGS, [f"--output_dir={folder}/run", *given_])
        assert code in (0, 1, 2)
        return f"exit {code}"
    except Reached:
        return "computes"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def try_many(name, cases, whole, first, capsys):
    """Draws the cases of one binary, none of which shows a traceback; what came of them."""
    module, counts = importlib.import_module(f"experiments.{name}"), {}

    @settings(
        max_examples=CASES or cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(arguments(module.FLAGS, whole))
    def one(given_):
        found = check(module, [*first, *given_])
        counts[found] = counts.get(found, 0) + 1
        event(found)

    one()
    assert "Traceback" not in capsys.readouterr().err
    with capsys.disabled():
        if CASES:
            print(f"{name}: {sum(counts.values())} cases, {counts}")
    return counts


@pytest.mark.parametrize("name", full_if(BINARIES, "run_width"))
def test_no_traceback_before_the_computation(name, monkeypatch, capsys):
    def reached(*_, **__):
        raise Reached

    monkeypatch.setattr(experiment, "run_folder", reached)
    monkeypatch.setattr(reproduce, "run_experiments", reached)
    monkeypatch.setattr(benchmark, "BENCHMARKS", dict.fromkeys(benchmark.BENCHMARKS, reached))
    counts = try_many(name, 8, WHOLE, (), capsys)
    assert counts.keys() <= {"computes", "exit 2", "exit 0", "exit 1"}


# One that trains, and one of each kind of measurement; where cases are asked for, all but the one
# that takes a minute a case.
COMPUTED = ("run_collapse", "run_convex_hull", "run_circle", "run_path_chains", "check_bounds")
if CASES:
    COMPUTED = tuple(n for n in reproduce.EXPERIMENTS if n != "run_architectures")


@pytest.mark.parametrize("name", COMPUTED)
def test_no_traceback_from_the_computation(name, capsys):
    try_many(name, 3, SMALL, describe_experiment(name).presets["tiny"], capsys)
    jax.clear_caches()
