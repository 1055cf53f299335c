"""pad_to: the numbers of inputs as they are, at one compilation for all lengths."""

import logging

import draws
import jax
import numpy as np
import pytest
from refusals import each_is_refused

import rank_collapse as rc
from rank_collapse.theory.logdomain import log_trace

D, MOST = 8, 12
CONFIG = rc.transformer(2, 2, D)
PURE = rc.san(2, 2, D)
EMBEDDING = rc.EmbeddingConfig(
    9, d_embed=D, positions="learned", num_positions=MOST, num_segments=2
)
MORE = {
    "plain": ({}, lambda n: {}),
    "causal": ({"mask": "causal"}, lambda n: {}),
    "mask": ({}, lambda n: {"mask": np.arange(n) != 1}),
    "bias": ({}, lambda n: {"bias": np.linspace(-1, 1, 2 * n * n).reshape(2, n, n)}),
    "memory": (
        {"cross_attention": True, "cross_skip": True},
        lambda n: {"memory": np.ones((3, D)).cumsum(0), "memory_mask": np.arange(3) < 2},
    ),
    "ids": (
        {"embedding": EMBEDDING},
        lambda n: {"segments": np.arange(n) % 2, "positions": np.arange(n)[::-1].copy()},
    ),
}


def states(n):
    return np.random.default_rng(n).normal(size=(n, D))


def compare(padded, plain, keep, token_axes):
    """Fields of two results; along the axis of tokens those that exist."""
    for name, axis in token_axes.items():
        a, b = (np.compress(keep, getattr(r, name), axis) for r in (padded, plain))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("case", MORE)
@pytest.mark.parametrize("n", [5, MOST])
def test_sums_over_paths_are_those_without_padding(case, n, x64):
    fields, inputs = MORE[case]
    config = CONFIG.replace(**fields)
    params = draws.parameters(config, 1)
    x = np.arange(n) % 9 if case == "ids" else states(n)
    plain = rc.path_contributions(params, x, config, **inputs(n))
    padded = rc.path_contributions(params, x, config, pad_to=MOST, **inputs(n))
    assert jax.tree.map(np.shape, padded) == jax.tree.map(np.shape, plain)
    axes = dict.fromkeys(("by_length", "offset", "output"), -2)
    keep = inputs(n).get("mask", np.ones(n, bool))
    compare(padded, plain, keep, axes | ({"from_memory": -2} if case == "memory" else {}))


@pytest.mark.full
@pytest.mark.parametrize("case", ["plain", "mask"])
def test_bounds_are_those_without_padding(case, x64):
    params, inputs = draws.parameters(PURE, 1), MORE[case][1](5)
    plain = rc.bound_report(params, states(5), PURE, **inputs)
    padded = rc.bound_report(params, states(5), PURE, pad_to=MOST, **inputs)
    keep = inputs.get("mask", np.ones(5, bool))
    compare(padded, plain, keep, {"log10_spread": -1})
    plain, padded = (r.replace(log10_spread=None) for r in (plain, padded))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), padded, plain)


@pytest.mark.full
def test_it_is_differentiable_under_jit(x64):
    params = draws.parameters(CONFIG, 1)

    def size(x, **how):
        return (rc.path_contributions(params, x, CONFIG, **how).by_length[1] ** 2).sum()

    plain, padded = (jax.jit(jax.grad(lambda x, h=h: size(x, **h))) for h in ({}, {"pad_to": MOST}))
    np.testing.assert_allclose(padded(states(5)), plain(states(5)), rtol=1e-9)


@pytest.mark.parametrize(
    "measure, config",
    [
        (rc.path_contributions, CONFIG),
        pytest.param(rc.bound_report, PURE, marks=pytest.mark.full),
    ],
)
def test_fifty_lengths_compile_what_one_does(measure, config, caplog):
    params, counts = draws.parameters(config, 1), []
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for n in range(1, 51):
            measure(params, states(n).astype(np.float32), config, pad_to=50)
            counts.append(sum(m.startswith("Compiling") for m in caplog.messages))
    assert set(counts) == {counts[0]} and counts[0] in (1, 2, 3)


def test_what_cannot_be_padded_is_refused():
    params, edit = draws.parameters(CONFIG, 1), {"mlp": lambda y, layer: 2 * y}
    pure = draws.parameters(PURE, 1)
    log = log_trace(pure, states(5), PURE)

    def sums(pad_to=MOST, **inputs):
        return rc.path_contributions(params, states(5), CONFIG, pad_to=pad_to, **inputs)

    tokens = r"pad_to=12 takes masks of tokens \[n\], and no edit or log"
    each_is_refused(
        (lambda: sums(4), "pad_to=4 is less than the 5 tokens of x"),
        (lambda: sums(mask=np.ones((5, 5), bool)), tokens),
        (lambda: sums(edit=edit), tokens),
        (lambda: rc.bound_report(pure, states(5), PURE, log=log, pad_to=MOST), tokens),
    )
