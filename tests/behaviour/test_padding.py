"""Padded tokens that a mask excludes change nothing of the others, in sums of paths and bounds."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.marks import full_but

N, LONGER, D = 5, 12, 8
CONFIG = rc.transformer(2, 2, D)
EMBEDDING = rc.EmbeddingConfig(
    9, d_embed=D, positions="learned", num_positions=LONGER, num_segments=2
)
CASES = {  # (fields, inputs, the axes of tokens of each input)
    "plain": ({}, {}, {}),
    "causal": ({"mask": "causal"}, {}, {}),
    "mask": ({}, {"mask": np.arange(N) != 1}, {}),
    "bias": ({}, {"bias": np.linspace(-1, 1, 2 * N * N).reshape(2, N, N)}, {"bias": (1, 2)}),
    "memory": (
        {"cross_attention": True, "cross_skip": True},
        {"memory": np.ones((3, D)).cumsum(0), "memory_mask": np.arange(3) < 2},
        {},
    ),
    "ids": (
        {"embedding": EMBEDDING},
        {"segments": np.arange(N) % 2, "positions": np.arange(N)[::-1].copy()},
        {"segments": (0,), "positions": (0,)},
    ),
}


def pad(a, axes=(0,)):
    return np.pad(a, [(0, LONGER - N) if i in axes else (0, 0) for i in range(a.ndim)])


def pad_inputs(inputs, axes):
    mask = inputs.get("mask", np.ones(N, bool))
    padded = {name: pad(a, axes[name]) if name in axes else a for name, a in inputs.items()}
    return padded | {"mask": pad(mask)}, mask


@pytest.mark.full
@pytest.mark.parametrize("case", full_but(CASES, "memory", "ids"))
def test_sums_over_paths_are_those_without_padding(case, x64):
    fields, inputs, axes = CASES[case]
    config = CONFIG.replace(**fields)
    params = draws.parameters(config, 1)
    x = np.arange(N) % 9 if case == "ids" else np.random.default_rng(N).normal(size=(N, D))
    padded, mask = pad_inputs(inputs, axes)
    expected = rc.path_contributions(params, x, config, **inputs)
    contributions = rc.path_contributions(params, pad(x), config, **padded)
    both = jax.device_get((contributions, expected))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        a, b = a[..., :N, :][..., mask, :], b[..., mask, :]
        assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.full
@pytest.mark.parametrize("case", ["plain", "mask"])
def test_bounds_are_those_without_padding(case, x64):
    config = rc.san(2, 2, D)
    params, x = draws.parameters(config, 1), np.random.default_rng(N).normal(size=(N, D))
    padded, mask = pad_inputs(CASES[case][1], {})
    expected = rc.bound_report(params, x, config, mask=mask)
    report = rc.bound_report(params, pad(x), config, **padded)
    spread = report.log10_spread[..., :N][..., mask]
    assert_close(spread, expected.log10_spread[..., mask], rtol=1e-9)
    expected, report = (r.replace(log10_spread=None) for r in (expected, report))
    jax.tree.map(lambda a, b: assert_close(a, b, rtol=1e-9), report, expected)
