"""Exact sums by length, in every configuration: against the output and walks over every path."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import D, N, config_of, example, relative
from path_oracle import Oracle

import rank_collapse as rc
from rank_collapse.paths.contributions import path_contributions

GRID = [
    config_of(
        norm_placement=placement,
        norm=norm,
        mlp=mlp,
        attention_skip=skip,
        mlp_skip=skip ^ odd,
        cross_attention=cross,
        skip_gain=0.7,
        branch_gain=1.3,
        final_norm=placement == "pre",
    )
    for (placement, norm), mlp, skip, odd, cross in itertools.product(
        [
            ("none", "layer"),
            ("pre", "layer"),
            ("post", "layer"),
            ("pre", "rms"),
            ("post", "rms"),
            ("sandwich", "layer"),
            ("branch", "rms"),
        ],
        ["none", "gelu", "swiglu"],
        [False, True],
        [False, True],
        [False, True],
    )
    if not (mlp == "none" and odd)
]
SPECIAL = {
    "gains by layer": config_of(
        mlp="gelu",
        attention_skip=True,
        mlp_skip=True,
        skip_gain=jnp.array([1.0, 0.2, -0.5]),
        branch_gain=jnp.array([0.3, 1.0, 2.0]),
    ),
    "unequal widths": config_of(attention_skip=True, num_heads=3, d_qk=2, d_v=5),
    "parallel experts, no skip": config_of(
        mlp="swiglu",
        norm_placement="sandwich",
        parallel=True,
        num_experts=4,
        experts_per_token=2,
        d_ff=14,
        d_shared=2,
        router="all",
    ),
    "one layer": config_of(depth=1, attention_skip=True, mlp="gelu", norm_placement="post"),
    "deep": config_of(
        depth=15, attention_skip=True, mlp_skip=True, mlp="gelu", norm_placement="pre"
    ),
}


@pytest.mark.slow
def test_every_configuration_equals_a_walk_over_every_path(x64):
    """Per length and MLP count, from the memory or not, and the offset, in float64.

    Without jit: the same few operations serve all configurations. Single fields are walked in
    tests/test_algebras.py.
    """
    walk([*GRID[::26], *GRID[13::26], *list(SPECIAL.values())[:-1]])


def walk(cases):
    worst = 0.0
    with jax.disable_jit():
        for i, config in enumerate(cases):
            params, x, extra = example(config)
            trace = rc.apply(params, x, config, **extra)
            ours = path_contributions(params, x, config, count_mlps=True, **extra)
            oracle = Oracle(params, trace, config, extra.get("memory"))
            grid, from_memory, offset = oracle.sums()
            pairs = [(ours.by_length, grid), (ours.offset, offset), (ours.total, trace.output)]
            pairs.append((ours.output, trace.output))
            if config.cross_attention:
                pairs.append((ours.from_memory, from_memory))
            else:
                assert ours.from_memory is None
            if i % 4 == 0:
                by_length, offset = path_contributions(params, x, config, **extra)
                assert by_length.shape == (config.depth + 1, N, D)
                pairs += [(by_length, grid.sum(axis=1)), (offset, ours.offset)]
            errors = [relative(a, b) for a, b in pairs if np.any(b)]
            assert max(errors) < 1e-12, (errors, config)
            assert all(not np.any(a) for a, b in pairs if not np.any(b)), config
            worst = max(worst, *errors)
    assert worst > 0, "different orders of summation cannot agree to the last bit"


@pytest.mark.parametrize("config", [*GRID[::40], SPECIAL["deep"]])
def test_single_precision_sums_to_the_output(config):
    params, x, extra = example(config)
    mask = jnp.arange(N) < N - 1
    output, ours = jax.jit(
        lambda p: (
            rc.apply(p, x, config, mask=mask, **extra).output,
            path_contributions(p, x, config, mask=mask, **extra),
        )
    )(params)
    by_length, offset = ours
    assert by_length.dtype == jnp.float32
    assert relative(by_length.sum(axis=0) + offset, output) < 1e-5
    assert relative(ours.output, output) < 1e-6
