"""Every field of a configuration × every pass: compared with an oracle, or refused by name.

`CASES` in oracles/field_cases.py sets each field away from its default; `NETWORKS` sets many at
once; `PASSES` has the oracle of each pass. `test_every_field_is_in_a_case` fails for a new field
until a case has it.
`python -m tests.behaviour.test_algebras` prints the table.
"""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

import rank_collapse as rc
from experiments.collapse import cubic_law
from rank_collapse.measures.norms import composite_norm
from rank_collapse.measures.residuals import residual
from rank_collapse.network.config import DEFAULTS, flat
from rank_collapse.network.covers import EVERYTHING, INERT, SIZES
from rank_collapse.paths.contributions import LengthPass
from rank_collapse.paths.steps import COVERS as PATHS
from rank_collapse.paths.truncation import Truncated
from rank_collapse.theory import bounds, exact, expectation, transverse
from rank_collapse.theory.logdomain import LogScaled
from tests.oracles import draws, mp_network
from tests.oracles.field_cases import CASES, NETWORKS, covered_parts, network
from tests.oracles.path_examples import config_of
from tests.oracles.path_sums import Oracle, enumerate_paths
from tests.support.closeness import assert_close


@functools.cache
def compute_trace(case, parts=()):
    params, x, config, extra = network(case, parts)
    with jax.enable_x64(True):
        return in_one_program(rc.apply, params, x, config, **extra)


def in_one_program(call, params, x, config, **inputs):
    """Runs a pass with all that prepares it in one program, where each step would be one."""
    run = jax.jit(lambda params, x, inputs: call(params, x, config, **inputs))
    return jax.device_get(run(params, x, inputs))


def test_every_field_is_in_a_case():
    changed = {
        name
        for case in CASES
        for name, value in flat(config_of(depth=2, **CASES[case])).items()
        if value is not DEFAULTS[name]
    }
    assert changed | (SIZES.keys() - INERT.keys()) == DEFAULTS.keys()


def test_every_field_is_covered_by_the_forward_pass():
    assert EVERYTHING.fields.keys() == DEFAULTS.keys()


def close(actual, expected, tolerance=1e-9):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert_close(actual, expected, rtol=0, atol=tolerance * np.max(np.abs(expected)))


def log10_residuals(trace):
    """Computes log10 of the residuals of ordinary states in float64."""
    return np.log10(jax.jit(jax.vmap(lambda x: composite_norm(residual(x))))(trace.hidden))


def compare_forward(params, x, config, extra, run_network):
    """Compares with the network written out in mpmath's numbers."""
    trace = run_network()
    has_functions = config.mix is not None or config.normalise is not None or callable(config.mlp)
    has_functions = has_functions or callable(config.norm) or config.rotary_layers
    if config.cross_attention or config.mixing is not None or has_functions:
        # Sums over single paths in NumPy. Their weights are compared by the tests of attention.
        total = Oracle(params, trace, config, **_memory(extra)).sums()
        return close(trace.output, total[0].sum(axis=(0, 1)) + total[2])
    with mpmath.workdps(20):
        hidden, _ = mp_network.exact_states(params, x, config)
    close(trace.hidden, np.array(hidden, float))


def _memory(extra):
    return {"memory": extra["memory"]} if extra else {}


def compare_lengths(params, x, config, extra, run_network):
    """Compares with sums over single paths."""
    trace = run_network()
    split = functools.partial(rc.path_contributions, count_mlps=True)
    contributions = in_one_program(split, params, x, config, **extra)
    close(contributions.total, trace.output)
    sums, from_memory, offset = Oracle(params, trace, config, **_memory(extra)).sums()
    close(contributions.by_length, sums)
    close(contributions.offset, offset)
    assert (contributions.from_memory is None) == (not extra)
    if extra:
        close(contributions.from_memory, from_memory)


def compare_heads(params, x, config, extra, _):
    """Compares with the derivative of the sums by the gain of one head."""
    if not config.cross_skip:  # every path starts at the memory, so that all contributions are 0
        assert not in_one_program(rc.head_contributions, params, x, config, **extra).any()
        config = config.replace(cross_skip=True)

    def output(gain):
        return rc.path_contributions(params, x, config, head_gain=gain, **extra).total

    contributions = in_one_program(rc.head_contributions, params, x, config, **extra)
    ones = np.ones((config.depth, config.num_heads))
    slope = jax.jit(lambda direction: jax.jvp(output, (ones,), (direction,))[1])
    for l in range(config.depth):
        direction = np.zeros_like(ones)
        direction[l, 1] = 1
        close(contributions[l, 1], slope(direction))


def compare_direct(params, x, config, extra, run_network):
    """Checks that the parts sum to the output."""
    trace = run_network()
    direct = in_one_program(rc.direct_contributions, params, x, config, **extra)
    close(direct.total, trace.output)


def compare_frozen_paths(params, x, config, extra, run_network):
    """Checks that all paths and the offset sum to the output."""
    trace = run_network()
    paths = enumerate_paths(config.depth, config.num_heads)[None]

    def sum_paths(params, x, config):
        path_sum = rc.paths.path_set_states(params, x, config, paths, semantics="frozen")[0]
        return path_sum + rc.path_contributions(params, x, config).offset

    close(in_one_program(sum_paths, params, x, config), trace.output)


def compare_recomputed_paths(params, x, config, extra, run_network):
    """Checks that the path through all heads is the network."""
    trace = run_network()
    follow = functools.partial(rc.paths.path_state, path=np.full(config.depth, -1))
    close(in_one_program(follow, params, x, config), trace.hidden[-1])


def compare_truncation(params, x, config, extra, run_network):
    """Checks that K = L cuts nothing off, and that K = 0 leaves the first channel alone."""
    trace = run_network()
    truncate = functools.partial(rc.truncated, length=np.array([0, config.depth]))
    truncation = in_one_program(truncate, params, x, config)
    close(truncation.output[1], trace.output)
    assert not np.any(np.asarray(truncation.by_length[0, 1:]))


def compare_logarithms(params, x, config, extra, run_network):
    trace = run_network()
    close(in_one_program(rc.log_residual_profile, params, x, config), log10_residuals(trace), 1e-8)


def compare_balls(params, x, config, extra, run_network):
    trace = run_network()
    close(rc.theory.exact_profile(params, x, config).profile, log10_residuals(trace), 1e-8)


def compare_bounds(params, x, config, extra, run_network):
    """Checks that the measured residual is right, and below every bound that holds."""
    trace = run_network()
    report = in_one_program(rc.bound_report, params, x, config)
    close(report.log10_residual, log10_residuals(trace), 1e-8)
    bounds_of_layers = report.layer, report.mean_layer, report.diameter_layer
    rows_differ = config.mask != "none" or config.position == "relative_bias"
    assert rows_differ == np.all(np.isnan(report.mean_layer.log10_rhs))
    for sides in bounds_of_layers if not rows_differ else ():
        assert np.all(sides.log10_lhs <= sides.log10_rhs + 1e-9)


def compare_tangent(params, x, config, extra, _):
    """Compares with the derivative of the forward pass at equal tokens."""
    mean = np.tile(np.mean(x, axis=0), (len(x), 1))
    difference = np.asarray(x) - mean

    @jax.jit
    def push(mean, difference):
        return jax.jvp(lambda x: rc.apply(params, x, config).hidden[-1], (mean,), (difference,))[1]

    pushed = np.asarray(push(mean, difference))
    ratio = np.linalg.norm(pushed - pushed.mean(axis=0)) / np.linalg.norm(difference)
    growth = np.sum(in_one_program(transverse.transverse_growth, params, x, config))
    if ratio > 1e-12:
        assert abs(growth - np.log10(ratio)) < 1e-8
    else:
        assert growth == -np.inf


def compare_cubic_law(params, x, config, extra, _):
    """Compares with the whole network at a residual of 1e-5, up to its square."""
    x = np.asarray(x)
    mean = x.mean(axis=0)
    x = mean + 1e-5 * (x - mean)
    profiles = (
        in_one_program(measure, params, x, config)
        for measure in (cubic_law.cubic_profile, rc.log_residual_profile)
    )
    close(*profiles, 1e-4)


def compare_expectation(params, x, config, extra, _):
    """Compares with the mean square of 400 networks' tokens, to 5 standard errors and 10 %."""
    rotary_width = (
        4 if config.rotary_tables else None
    )  # two pairs, of which the table has frequencies
    wide = jax.tree.map(lambda a: np.tile(a, 6) if np.shape(a)[1:] == (8,) else a, config)
    wide = wide.replace(d_model=48, d_qk=None, d_v=None, d_ff=96, rotary_width=rotary_width)
    x = draws.normal(len(x), 48)
    extra = {k: np.tile(v, (1, 6)) if k == "memory" else v for k, v in extra.items()}
    params = draws.parameters(wide, bias_scale=0.0, gain_scale=0.0)
    expected = in_one_program(expectation.expected_pass, params, x, wide, **extra)
    predicted = expected.hidden.variance.mean(axis=1)

    @jax.jit
    @jax.vmap
    def compute_mean_squares(params):
        return jnp.mean(jnp.square(rc.apply(params, x, wide, **extra).hidden), axis=(1, 2))

    squares = compute_mean_squares(draws.redrawn(params, 400))
    error = 5 * squares.std(axis=0) / np.sqrt(len(squares)) + 0.1 * predicted
    assert np.all(np.abs(squares.mean(axis=0) - predicted) < error)


class Pass(NamedTuple):
    """What a pass covers, its comparison with an oracle, and a call that refuses the rest.

    A comparison gets a function that computes the network's trace: not every one needs it.
    """

    covers: Any
    compare: Any
    call: Any


PASSES = {
    "forward": Pass(EVERYTHING, compare_forward, rc.apply),
    "sums by length": Pass(LengthPass.covers, compare_lengths, rc.path_contributions),
    "heads": Pass(EVERYTHING, compare_heads, rc.head_contributions),
    "direct": Pass(EVERYTHING, compare_direct, rc.direct_contributions),
    "frozen paths": Pass(
        PATHS["frozen"],
        compare_frozen_paths,
        lambda p, x, c, **i: rc.paths.path_state(
            p, x, c, np.zeros(2, int), semantics="frozen", **i
        ),
    ),
    "recomputed paths": Pass(
        PATHS["recomputed"],
        compare_recomputed_paths,
        lambda p, x, c, **i: rc.paths.path_state(p, x, c, np.zeros(2, int), **i),
    ),
    "truncation": Pass(
        Truncated.covers, compare_truncation, lambda p, x, c, **i: rc.truncated(p, x, c, 1)
    ),
    "logarithms": Pass(LogScaled.covers, compare_logarithms, rc.log_residual_profile),
    "balls": Pass(
        exact.Balls.covers, compare_balls, lambda p, x, c, **i: rc.theory.exact_profile(p, x, c)
    ),
    "bounds": Pass(bounds.COVERS, compare_bounds, lambda p, x, c, **i: rc.bound_report(p, x, c)),
    "tangent": Pass(transverse.LinearAttention.covers, compare_tangent, rc.transverse_exponents),
    "cubic law": Pass(cubic_law.COVERS, compare_cubic_law, cubic_law.cubic_profile),
    "expectation": Pass(expectation.COVERS, compare_expectation, expectation.expected_pass),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_is_not_covered_is_refused_by_name(name):
    covers, _, call = PASSES[name]
    for case in CASES:
        reason = covers.refusal(config_of(depth=2, **CASES[case]))
        if reason is not None:
            params, x, config, extra = network(case)
            with jax.enable_x64(True), pytest.raises(ValueError) as error:
                call(params, x, config, **extra)
            assert f"does not cover {reason}" in str(error.value), (name, case)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PASSES)
def test_what_is_covered_is_right(name, case):
    covers, compare, _ = PASSES[name]
    params, x, config, extra = network(case)
    if covers.refusal(config) is None:
        with jax.enable_x64(True):
            compare(params, x, config, extra, functools.partial(compute_trace, case))


# Of the usual run: networks of which a pass covers most parts. The full suite has all.
QUICK = {
    "forward": tuple(NETWORKS),
    "sums by length": tuple(NETWORKS),
    "heads": ("decoder", "cross-attention"),
    "direct": ("decoder", "encoder", "sandwich", "both norms", "cross-attention"),
    "frozen paths": ("decoder", "both norms"),
    "recomputed paths": ("decoder", "encoder", "sandwich", "both norms"),
    "truncation": ("decoder", "encoder", "sandwich", "both norms"),
    "logarithms": ("decoder", "encoder", "sandwich"),
    "balls": ("decoder", "encoder", "sandwich", "both norms", "norms of branches"),
    "bounds": ("skips of MLPs alone",),
    "tangent": ("decoder", "encoder", "sandwich"),
    "cubic law": ("skips of MLPs alone",),
    "expectation": ("cross-attention",),
}


def mark_network(name, case):
    return pytest.param(name, case, marks=() if case in QUICK[name] else pytest.mark.full)


@pytest.mark.parametrize(("name", "case"), [mark_network(n, c) for c in NETWORKS for n in PASSES])
def test_many_fields_at_once_are_right(name, case):
    parts = covered_parts(case, PASSES[name].covers)
    with jax.enable_x64(True):
        run_network = functools.partial(compute_trace, case, parts)
        PASSES[name].compare(*network(case, parts), run_network)


def table() -> str:
    """Writes the table of fields × passes: + is compared with an oracle, − is refused."""
    rows = ["| fields | " + " | ".join(PASSES) + " |", "|---" * (len(PASSES) + 1) + "|"]
    for case, fields in CASES.items():
        config = config_of(depth=2, **fields)
        marks = ("+" if p.covers.refusal(config) is None else "−" for p in PASSES.values())
        rows.append(f"| {case} | " + " | ".join(marks) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
