"""Differences along a spanning tree: exact in clusters, equal to the table's, and proved right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import parameters, tokens
from marks import slow_but
from pair_cases import CASES, QUICK, drawn, profiles, proofs, right_or_refused

import rank_collapse as rc
from rank_collapse.theory import noise, pairs, spanning_tree
from rank_collapse.theory.noise import Silence
from rank_collapse.theory.pair_operations import PairState

# Natural logarithms of three sizes of clusters; float32 ends at e^-103.
SIZES = 2.0, -40.0, -150.0
WIDTH = 5
AS_USERS_COMPILE = {
    "xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def clusters():
    """27 tokens in clusters of clusters, at random places: all differences, in float64.

    In each cluster a random walk, so that far ends are many steps apart.
    """
    rng = np.random.default_rng(0)
    paths = rng.permutation(np.stack(np.meshgrid(*3 * [range(3)]), -1).reshape(-1, 3))
    walks = np.cumsum(rng.standard_normal((3, 27, 3, WIDTH)), axis=2)
    group = (paths[:, 0], 3 * paths[:, 0] + paths[:, 1], 9 * paths[:, 0] + 3 * paths[:, 1])
    group = np.stack([np.zeros(27, int), *group[:2]])
    parts = np.stack([walks[l, group[l], paths[:, l]] for l in range(3)])  # [level, token, width]
    rest, log_scale = np.zeros((27, 27, WIDTH)), np.full((27, 27), -np.inf)
    for i, k in np.ndindex(27, 27):
        if i != k:
            first = int(np.argmax(paths[i] != paths[k]))
            steps = np.exp(np.subtract(SIZES, SIZES[first]))[first:, None]
            step = np.sum(steps * (parts[first:, i] - parts[first:, k]), axis=0)
            rest[i, k] = step / np.abs(step).max()
            log_scale[i, k] = SIZES[first] + np.log(np.abs(step).max())
    return rest, log_scale


def state_of(rest, log_scale):
    """As a table in float32, whose columns a tree can be grown from; the tokens do not matter."""
    rest, log_scale = jnp.asarray(rest, jnp.float32), jnp.asarray(log_scale, jnp.float32)
    return PairState(jnp.zeros(rest.shape[1:], jnp.float32), rest, log_scale)


def columns_of(tree):
    """The table of a tree."""
    every = jnp.arange(tree.order.shape[0])
    rest, log_scale = jax.vmap(lambda k: tree.column(k, Silence()), out_axes=1)(every)
    return np.asarray(rest), np.asarray(log_scale)


def test_a_tree_keeps_every_difference_of_clusters_within_clusters(clusters):
    rest, log_scale = clusters
    tree = jax.jit(lambda state: spanning_tree.grown(state, Silence()))(state_of(*clusters))
    assert sorted(np.asarray(tree.order)) == list(range(27)) and tree.rest.shape == (27, WIDTH)
    lengths = np.sort(np.asarray(tree.log_scale)[1:])
    assert (lengths[:18] < -120).all() and (lengths[24:] > -10).all()  # clusters one by one
    got = columns_of(tree)
    np.testing.assert_array_equal(got[1].diagonal(), -np.inf)
    others = ~np.eye(27, dtype=bool)
    eps = np.finfo(np.float32).eps
    # in size by the rounding of logarithms up to 150, in direction by that of a few additions
    np.testing.assert_allclose(got[1][others], log_scale[others], rtol=0, atol=300 * eps)
    np.testing.assert_allclose(got[0], rest, rtol=0, atol=300 * eps)


def test_a_ring_loses_what_the_number_of_tokens_allows():
    """The worst shape: Prim's order leaps from end to end of the arc that it has reached."""
    n, eps = 64, np.finfo(np.float32).eps
    angle = 2 * np.pi * np.random.default_rng(1).permutation(n) / n
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    rest, log_scale = columns_of(spanning_tree.start(jnp.asarray(x, jnp.float32)))
    given = np.float32(x).astype(float)
    exact = given[:, None] - given[None, :]
    size = np.max(np.abs(exact), axis=2)
    error = np.max(np.abs(np.exp(log_scale)[..., None] * rest - exact), axis=2)
    others = ~np.eye(n, dtype=bool)
    assert n * eps / 64 < np.max(error[others] / size[others]) < n * eps


def test_tokens_at_unknown_distances_spoil_no_difference_of_others(clusters):
    lost = np.isin(np.arange(27), (0, 11, 26))
    hidden = lost[:, None] | lost[None, :]
    state = state_of(clusters[0], np.where(hidden, np.nan, clusters[1]))
    tree = spanning_tree.grown(state, Silence())
    got = columns_of(tree)[1]
    np.testing.assert_allclose(got[~hidden], clusters[1][~hidden], rtol=0, atol=1e-4)
    others = hidden & ~np.eye(27, dtype=bool)
    assert np.isnan(got[others]).all()


def test_references_have_the_columns_of_their_tokens(clusters):
    tree = spanning_tree.grown(state_of(*clusters), Silence())
    reference = jnp.array([3, 0, 3])
    rest, log_scale = tree.columns(reference, Silence())
    table = columns_of(tree)
    np.testing.assert_array_equal(rest, np.moveaxis(table[0][:, reference], 1, 0))
    np.testing.assert_array_equal(log_scale, table[1][:, reference].T)
    words, ulps = noise.copies(1)
    moved, _ = tree.columns(reference, noise.Noise(words[1], ulps[1]))
    change = np.abs(moved - rest)
    assert change.max() < 1e-4 and (change[0] != change[2]).any()


# By tree and by table: a program each.
SKIPS = {"attention_skip": True, "mlp_skip": True, "d_ff": 24, "mask": "causal"}
NETWORKS = {
    "post-LN, GELU": {"norm_placement": "post", "mlp": "gelu"} | SKIPS,
    "pre-RMS, SwiGLU": {"norm_placement": "pre", "norm": "rms", "mlp": "swiglu"} | SKIPS,
    "sandwich, ReLU, parallel, bare": {
        "norm_placement": "sandwich", "mlp": "relu", "parallel": True, "first_norm": False,
    } | SKIPS,
    "attention alone": {},
}  # fmt: skip
SCALES, GAINS = (0.3, 1, 2, 3, 4, 6), (1, 0, 0.3, 1e-30, 1, 0.1)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("network", slow_but(NETWORKS, "post-LN, GELU"))
def test_equals_the_table(network, dtype):
    """Wherever both are known; neither is NaN much more often."""
    config = rc.TransformerConfig(depth=4, num_heads=2, d_model=12, **NETWORKS[network])
    with jax.enable_x64(dtype == np.float64):
        draws = [parameters(config, s, scale) for s, scale in enumerate(SCALES)]
        params = jax.tree.map(lambda *a: np.stack(a).astype(dtype), *draws)
        x = np.stack([tokens(10, 12, s) for s in range(len(SCALES))]).astype(dtype)
        gains = np.asarray(GAINS, dtype)
        configs = jax.vmap(lambda gain: config.replace(skip_gain=gain))(gains)
        by_tree = profiles(params, x, configs, largest_table=0)
        by_table = profiles(params, x, configs)
    assert by_tree.dtype == dtype
    right_or_refused(by_tree, by_table)
    unknown = np.isnan(by_tree).mean(), np.isnan(by_table).mean()
    assert abs(unknown[0] - unknown[1]) < 0.1 and max(unknown) < 0.5
    if dtype == np.float64:
        np.testing.assert_allclose(by_tree, by_table, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", slow_but(CASES, "pre-RMS, skips, GeGLU, local"))
def test_right_at_any_weights(case):
    params, x, config, inputs = drawn(case)
    got, want = profiles(params, x, config, largest_table=0, **inputs), proofs(case)
    assert got.dtype == np.float32
    seen = right_or_refused(got, want)
    assert seen.mean() > 0.9 and np.isnan(got).mean() < 0.05


@pytest.mark.slow
def test_masked_tokens_are_as_if_removed():
    config = rc.san(3, 2, 16)
    params, x = parameters(config, weight_scale=2.0), tokens(6, 16).at[2].set(1e6)
    exists = np.array([1, 1, 0, 1, 1, 1], bool)
    padded = pairs.pair_profile(params, x, config, mask=exists, largest_table=0)
    removed = pairs.pair_profile(params, x[exists], config, largest_table=0)
    np.testing.assert_allclose(padded, removed, rtol=1e-4, atol=1e-4)


def test_tokens_that_see_nothing_give_nan_and_equal_tokens_minus_infinity():
    config = rc.san(2, 2, 8)
    blind = np.ones((4, 4), bool)
    blind[2] = False
    single = jax.jit(
        lambda x, mask: pairs.pair_profile(
            parameters(config), x, config, mask=mask, largest_table=0
        ),
        compiler_options=QUICK,
    )
    got = np.asarray(single(tokens(4, 8), blind))
    assert np.isfinite(got[0]) and np.isnan(got[1:]).all()
    np.testing.assert_array_equal(single(jnp.ones((4, 8)), np.ones_like(blind)), -np.inf)


def test_no_table_is_held():
    """All of the pass's arrays together are smaller than one table in one of the copies."""
    n, d = 128, 32
    config = rc.san(1, 1, d)
    params = parameters(config)

    def needed(largest_table):
        def single(x):
            return pairs.pair_profile(params, x, config, largest_table=largest_table)

        compiled = jax.jit(single, compiler_options=QUICK).lower(tokens(n, d)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert needed(0) < n * n * d * 4 / 2


@pytest.mark.slow
def test_beyond_the_largest_table():
    """Taken by itself, and right where one scale in float64 is certain."""
    n, d = 264, 248
    assert n * n * d > pairs.LARGEST_TABLE
    config = rc.TransformerConfig(depth=2, num_heads=1, d_model=d, attention_skip=True)
    params, x = parameters(config, weight_scale=1.5), tokens(n, d)
    compiled = jax.jit(
        lambda p, x: pairs.pair_profile(p, x, config), compiler_options=AS_USERS_COMPILE
    )
    got = compiled(params, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
        want = rc.log_residual_profile(*wide, config)
    assert not np.isnan(want).any() and not np.isnan(got).any()
    np.testing.assert_allclose(got, want, rtol=noise.RELATIVE, atol=noise.ABSOLUTE)


@pytest.mark.parametrize(
    ("fields", "shape", "message"),
    [
        ({"cross_attention": True}, (6, 16), "cross_attention=True"),
        ({"score": "additive"}, (513, 16), "513 tokens of width 16 .* 4210704 in an array"),
        ({}, (6, 17), r"\(6, 17\)"),
    ],
)
def test_refusals_name_the_value(fields, shape, message):
    config = rc.TransformerConfig(depth=1, num_heads=4, d_model=16, **fields)
    with pytest.raises(ValueError, match=message):
        pairs.pair_profile(parameters(config), jnp.ones(shape), config, largest_table=0)
