"""Any flags of any binary: done, or one line and exit 2, and never a traceback.

    RANK_COLLAPSE_CASES=1000 python -m pytest -n 0 -s -m "" tests/behaviour/test_any_flags.py

draws 1000 cases for each binary (a few by default) and prints how many there were. In the first
test a case ends where it would open its folder, after flags, networks, data and sweeps are checked.
The second computes what the flags ask for, at small sizes.
"""

import importlib
import os
import signal
import tempfile

import jax
import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from experiments import benchmark, reproduce
from experiments.lab import cli, run
from experiments.lab.experiment import describe_experiment
from tests.support.marks import full_if

pytestmark = pytest.mark.full

CASES = int(os.environ.get("RANK_COLLAPSE_CASES", "0"))
LIMIT = 300  # seconds, far above what comes before the computation: a hang fails
BINARIES = [*reproduce.EXPERIMENTS, "reproduce", "benchmark"]
# They start processes, wait for others, or show tracebacks on purpose.
SKIPPED = {
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
INTEGERS = (-(10**20), -1, 0, 1, 2, 3, 7, 64, 10**6, 10**20)
SMALL = (0, 1, 2, 3)
FRACTIONS = (-1.0, 0.0, 1e-320, 1e-30, 0.3, 1.0, 2.0, 1e30, 1e308)


class Reached(Exception):
    """Where the computation would begin."""


def make_values(flag, integers):
    """Makes the values of a flag, allowed ones and mistaken ones."""
    kind, odd = flag.flag_type(), st.sampled_from(ODD)
    values = {"bool": ("true", "false"), "int": integers, "float": FRACTIONS}
    choices = getattr(flag.parser, "enum_values", None) or values.get(kind)
    if choices:
        return st.sampled_from(choices).map(str) | odd
    defaults = flag.default if isinstance(flag.default, list) else []
    numbers = integers if kind == "numbers" else [*defaults, *integers[:4], 1e-3]
    number = st.sampled_from(numbers).map(str)
    return st.lists(number if kind == "numbers" else number | odd, max_size=3).map(",".join) | odd


@st.composite
def make_arguments(draw, values, integers):
    """Draws some flags of a binary with values, one of them perhaps swept."""
    names = [n for n in values if values[n].name == n and n not in SKIPPED]
    chosen = draw(st.lists(st.sampled_from(sorted(names)), max_size=4, unique=True))
    arguments = [f"--{name}={draw(make_values(values[name], integers))}" for name in chosen]
    if "sweep" in values and draw(st.integers(0, 3)) == 0:
        name = draw(st.sampled_from(sorted(names)))
        points = draw(st.lists(make_values(values[name], integers), min_size=1, max_size=2))
        arguments.append(f"--sweep={name}={','.join(points)}")
    return arguments


def check(module, arguments):
    """Runs a binary; returns its exit code as a word, or "computes"."""

    def raise_timeout(*_):
        raise AssertionError(f"more than {LIMIT} s: {arguments}")

    handler = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(LIMIT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            code = cli.execute(
                module.main, module.FLAGS, [f"--output_dir={folder}/run", *arguments]
            )
        assert code in (0, 1, 2)
        return f"exit {code}"
    except Reached:
        return "computes"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def try_many(name, cases, integers, first, capsys):
    """Draws the cases of one binary, none of which shows a traceback; counts their outcomes."""
    module, counts = importlib.import_module(f"experiments.{name}"), {}

    @settings(
        max_examples=CASES or cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(make_arguments(module.FLAGS, integers))
    def run_case(arguments):
        outcome = check(module, [*first, *arguments])
        counts[outcome] = counts.get(outcome, 0) + 1
        event(outcome)

    run_case()
    assert "Traceback" not in capsys.readouterr().err
    with capsys.disabled():
        if CASES:
            print(f"{name}: {sum(counts.values())} cases, {counts}")
    return counts


@pytest.mark.parametrize("name", full_if(BINARIES, "run_width"))
def test_no_traceback_before_the_computation(name, monkeypatch, capsys):
    def raise_reached(*_, **__):
        raise Reached

    monkeypatch.setattr(run, "open_folder", raise_reached)
    monkeypatch.setattr(reproduce, "run_experiments", raise_reached)
    monkeypatch.setattr(benchmark, "BENCHMARKS", dict.fromkeys(benchmark.BENCHMARKS, raise_reached))
    try_many(name, 8, INTEGERS, (), capsys)


# One that trains, and one of each kind of measurement. If a number of cases is set: all but
# run_architectures, which takes a minute a case.
COMPUTED = ("run_collapse", "run_convex_hull", "run_circle", "run_path_chains", "check_bounds")
if CASES:
    COMPUTED = tuple(n for n in reproduce.EXPERIMENTS if n != "run_architectures")


@pytest.mark.parametrize("name", COMPUTED)
def test_no_traceback_from_the_computation(name, capsys):
    try_many(name, 3, SMALL, describe_experiment(name).presets["tiny"], capsys)
    jax.clear_caches()
