"""Exact sums by length, and truncated networks: against outputs, slow walks and every path."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.paths.contributions import PathContributions, path_contributions
from rank_collapse.paths.frozen import frozen_scale
from rank_collapse.paths.heads import head_contributions
from tests.oracles import draws
from tests.oracles.path_examples import HEADS, D, N, config_of, example, relative
from tests.oracles.path_sums import Oracle
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused, parametrize_refusals

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


@pytest.mark.full
def test_every_configuration_equals_a_walk_over_every_path(x64):
    """Per length and MLP count, from the memory or not, and the offset, in float64.

    Without jit: the same few operations serve all configurations. Single fields are walked in
    tests/behaviour/test_algebras.py.
    """
    worst, cases = 0.0, [*GRID[::26], *list(SPECIAL.values())[:-1]]
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


@pytest.mark.full
@pytest.mark.parametrize("config", [*GRID[::70], SPECIAL["deep"]])
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


# What one does with exact path sums: leave out, accumulate, differentiate, vmap, compile once.


compiled_contributions = jax.jit(path_contributions, static_argnames="count_mlps")


SMALL = config_of(
    depth=2, mlp="gelu", attention_skip=True, mlp_skip=True, norm_placement="post", skip_gain=0.8
)


def small_example():
    return example(SMALL)[:2]


@pytest.mark.parametrize("state", [(), (3,), (5, 3), (2, 5, 3)])
@pytest.mark.parametrize("count_mlps", [False, True])
def test_views_of_sums_are_written_out_for_stacks_too(count_mlps, state):
    rng = np.random.default_rng(0)
    sums, offset = rng.standard_normal((2, 4, 4, *state)), rng.standard_normal((2, *state))
    sums = sums if count_mlps else sums[:, :, 0]
    ours = PathContributions(sums, offset, count_mlps=count_mlps, num_state_axes=len(state))
    c = sums.sum(axis=2) if count_mlps else sums
    np.testing.assert_array_equal(ours.by_attention_length, c)
    assert_close(ours.total, c.sum(axis=1) + offset, rtol=1e-12)
    up_to, all_but = ours.up_to(), ours.all_but()
    assert up_to.shape == all_but.shape == c.shape
    for k in range(4):
        assert_close(up_to[:, k], c[:, : k + 1].sum(1) + offset, atol=1e-5)
        others = np.delete(c, k, axis=1).sum(axis=1)
        assert_close(all_but[:, k], others + offset, atol=1e-5)
    by_length, last = ours
    assert by_length is sums and last is offset and ours.from_memory is ours.output is None


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_scale_of_a_frozen_norm_has_the_dtype_of_its_state(norm):
    x = draws.normal(N, D, seed=3)
    config = config_of(norm=norm, norm_eps=0.1)
    centre = np.asarray(x).mean(axis=1, keepdims=True) * (norm == "layer")
    want = 1 / np.sqrt(np.square(x - centre).mean(axis=1, keepdims=True) + 0.1)
    for dtype, rtol in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.02)):
        scale = frozen_scale(jnp.asarray(x, dtype), config)
        assert scale.dtype == dtype
        assert_close(scale.astype(jnp.float32), want, rtol=rtol)


@pytest.mark.full
def test_lengths_up_to_k_and_all_but_k():
    params, x = small_example()
    for count in (False, True):
        ours = compiled_contributions(params, x, SMALL, count_mlps=count)
        up_to, all_but = np.asarray(ours.up_to()), np.asarray(ours.all_but())
        c = np.asarray(ours.by_attention_length)
        assert_close(up_to[1], c[0] + c[1] + ours.offset, atol=1e-5)
        assert_close(up_to[-1], ours.output, atol=1e-5)
        assert_close(all_but[1], c[0] + c[2] + ours.offset, atol=1e-5)


@pytest.mark.full
def test_what_is_left_out_is_what_passed_through_it(x64):
    """Dropping a head removes its paths, their sum is the gain's derivative, lengths add up."""
    params, x = small_example()
    full = compiled_contributions(params, x, SMALL)
    through = jax.jit(head_contributions)(params, x, SMALL)
    assert through.shape == (2, HEADS, N, D)
    trace = jax.jit(rc.apply)(params, x, SMALL)
    terms = list(Oracle(params, trace, SMALL).paths_through(layer=1, head=0))
    expected = sum(state for _, state in terms)
    dropped = compiled_contributions(
        params, x, SMALL, head_gain=jnp.ones((2, HEADS)).at[1, 0].set(0.0)
    )
    assert relative(full.total - dropped.total, through[1, 0]) < 1e-12
    without_bias = full.by_length.sum(axis=0) - dropped.by_length.sum(axis=0)
    assert relative(without_bias, expected) < 1e-12
    none = compiled_contributions(params, x, SMALL, head_gain=jnp.zeros((2, HEADS)))
    assert relative(none.by_length[0], full.by_length[0]) < 1e-12
    assert not np.any(none.by_length[1:])


@pytest.mark.full
def test_gains_of_one_change_nothing_and_multiply_those_of_the_network(x64):
    config = SMALL.replace(branch_gain=jnp.array([0.6, -0.3]))
    params, x, _ = example(config)
    plain = compiled_contributions(params, x, config)
    ones = compiled_contributions(params, x, config, head_gain=jnp.ones((2, HEADS)))
    assert relative(ones.by_length, plain.by_length) < 1e-13
    heads = compiled_contributions(params, x, config, head_gain=0.5 * jnp.ones((2, HEADS)))
    assert relative(heads.by_length[2], 0.25 * plain.by_length[2]) < 1e-13


def test_gains_of_heads_leave_paths_from_the_memory_alone(x64):
    """Of one layer nothing comes before its cross-attention that a gain of 0 could cut off."""
    config = config_of(depth=1, cross_attention=True, attention_skip=True, cross_skip=True)
    params, x, extra = example(config)
    plain, none = (
        path_contributions(params, x, config, head_gain=gain * np.ones((1, HEADS)), **extra)
        for gain in (1, 0)
    )
    assert np.any(plain.from_memory[1]) and not np.any(plain.from_memory[0])
    assert_close(none.from_memory, plain.from_memory, atol=1e-12)
    assert_close(none.by_length[1], plain.from_memory[1], atol=1e-12)
    assert_close(none.by_length[0], x, atol=1e-12)
    assert np.abs(plain.by_length[1] - plain.from_memory[1]).max() > 0.1
    w_o = params.layers.attention.w_o
    for head, gain in enumerate(np.eye(HEADS)):  # as of a network whose other heads write nothing
        alone = draws.changed(
            params, attention={"w_o": jnp.zeros_like(w_o).at[:, head].set(w_o[:, head])}
        )
        expected = path_contributions(alone, x, config, head_gain=np.ones((1, HEADS)), **extra)
        ours = path_contributions(params, x, config, head_gain=gain[None], **extra)
        before = expected.by_length[1] - expected.from_memory[1]
        assert_close(ours.by_length[1] - ours.from_memory[1], before, atol=1e-12)
        assert np.abs(before).max() > 0.05


@pytest.mark.full
def test_gradient_equals_finite_differences(x64):
    """Through attention, norms and gates too: what is frozen is a function of the parameters."""
    config = SMALL.replace(final_norm=True)
    params, x, _ = example(config)
    params = jax.tree.map(np.asarray, params)
    direction = jax.tree.map(lambda a: np.cos(np.arange(a.size)).reshape(a.shape), params)

    @jax.jit
    @jax.value_and_grad
    def differentiate(params):
        return jnp.sin(rc.path_contributions(params, x, config).by_length).sum()

    def measure(t):
        return float(differentiate(jax.tree.map(lambda a, e: a + t * e, params, direction))[0])

    h = 1e-5  # a stencil of fourth order: the direction is long and the function far from linear
    slope = (8 * (measure(h) - measure(-h)) - (measure(2 * h) - measure(-2 * h))) / (12 * h)
    gradients = jax.tree.map(np.vdot, differentiate(params)[1], direction)
    assert sum(jax.tree.leaves(gradients)) == pytest.approx(slope, rel=1e-7)
    assert abs(slope) > 1e-2


@pytest.mark.full
def test_memory_does_not_grow_with_attention_matrices():
    """Temporaries beyond the weights: channels, and one layer's attention, not all layers'."""
    d, h, n = 8, 8, 96

    def temporaries(depth):
        config = rc.san_skip(depth, h, d)
        params = jax.eval_shape(lambda k: rc.init(k, config), jax.random.key(0))
        x = jax.ShapeDtypeStruct((n, d), jnp.float32)
        lowered = jax.jit(lambda p, x: compiled_contributions(p, x, config).by_length).lower(
            params, x
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one_layer = 4 * h * n * n
    assert temporaries(16) - temporaries(4) < 2 * one_layer


@parametrize_refusals(
    [
        ({"head_gain": jnp.ones((3, HEADS))}, r"head_gain has the shape \(3, 2\), .* = \(2, 2\)"),
        ({"mask": jnp.ones(9, bool)}, r"mask of shape \(9,\)"),
        ({"config": SMALL.replace(cross_attention=True)}, "needs a memory"),
        ({"x": jnp.ones((N, 5))}, "d_model=8"),
    ]
)
def test_bad_input_is_named(arguments, message):
    (options,) = arguments
    is_refused(
        message,
        lambda: compiled_contributions(
            **{"params": small_example()[0], "x": small_example()[1], "config": SMALL} | options
        ),
    )
