"""Lengths of paths by weight, against enumeration and sums of frozen paths."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import rank_collapse as rc
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.folders import REPOSITORY
from tests.support.refusals import is_refused

DATA = REPOSITORY / "experiments/attention_shares.json"
MODELS = json.loads(DATA.read_text("utf-8"))["models"]
SHARES = np.array([0.7, 0.2, 0.5, 0.35])


def causal_weights(depth, num_heads, num_tokens, seed=0):
    """Attention weights [L, h, n, n] without symmetry, float64."""
    scores = np.random.default_rng(seed).standard_normal((depth, num_heads, num_tokens, num_tokens))
    weights = np.exp(scores) * np.tril(np.ones((num_tokens, num_tokens)))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_the_law_is_the_sum_over_all_choices_of_layers():
    expected = np.zeros(5)
    for choice in itertools.product((0, 1), repeat=4):
        expected[sum(choice)] += np.prod(np.where(choice, SHARES, 1 - SHARES))
    assert_close(rc.path_length_law(SHARES), expected, rtol=1e-14)
    stacked = rc.path_length_law(np.stack([SHARES, SHARES[::-1]]))
    assert_close(stacked, [expected, expected], rtol=1e-14)


def test_shares_of_equal_heads_and_skips_give_the_count_of_the_paper():
    depth, num_heads = 12, 16
    counts = np.array(rc.count_paths(depth, num_heads), float)
    law = rc.path_length_law(np.full(depth, num_heads / (1 + num_heads)))
    assert_close(law, counts / counts.sum(), rtol=1e-12)
    assert_close(law, stats.binom(depth, num_heads / (1 + num_heads)).pmf(range(13)))


def test_rollout_by_length_is_the_sum_over_all_choices_of_layers():
    weights = causal_weights(4, 3, 5)
    expected = np.zeros((5, 5, 5))
    for choice in itertools.product((0, 1), repeat=4):
        product = np.eye(5)
        for layer, taken in enumerate(choice):
            factor = SHARES[layer] * weights[layer].mean(axis=0)
            product = (factor if taken else (1 - SHARES[layer]) * np.eye(5)) @ product
        expected[sum(choice)] += product
    terms = rc.rollout(weights, SHARES, by_length=True)
    assert_close(terms, expected, atol=1e-15)
    assert_close(rc.rollout(weights, SHARES), expected.sum(axis=0), atol=1e-15)
    assert_close(terms[..., -1, :].sum(-1), rc.path_length_law(SHARES), rtol=1e-13)
    one_share = rc.rollout(weights, 0.3, by_length=True)
    assert_close(one_share, rc.rollout(weights, np.full(4, 0.3), by_length=True))
    mean_rollout = rc.rollout(weights.mean(axis=1), SHARES)
    assert_close(mean_rollout, expected.sum(axis=0), atol=1e-15)
    half = np.linalg.multi_dot([(np.eye(5) + a.mean(axis=0)) / 2 for a in weights[::-1]])
    assert_close(rc.rollout(weights), half, atol=1e-15)


def test_a_list_of_layers_is_their_stack():
    """Layers of one example, as transformers returns them, too."""
    weights = causal_weights(4, 3, 5)
    expected = rc.rollout(weights, SHARES)
    assert_close(rc.rollout(list(weights), SHARES), expected)
    assert_close(rc.rollout(tuple(weights[:, None]), SHARES), expected)
    # one token, and one head: not a batch of one
    assert_close(rc.rollout(list(weights[:, :1]), SHARES), rc.rollout(weights[:, 0], SHARES))
    assert_close(rc.rollout(list(np.ones((4, 1, 1))), SHARES), [[1]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rollout_has_the_dtype_of_the_weights(dtype):
    weights = causal_weights(2, 1, 3).astype(dtype)
    for shares in (0.5, SHARES[:2].astype(np.float32), SHARES[:2]):
        assert rc.rollout(weights, shares).dtype == dtype


def test_rollout_is_the_frozen_paths_of_a_network_with_these_gains():
    """Skip gain 1 − λ, branch gain λ, W_V W_O = I, one head."""
    depth, n = 30, 16
    shares = np.array(MODELS["BLOOM-7b1"]["shares"])
    weights = causal_weights(1, 1, n)[0]
    with jax.enable_x64(True):
        config = rc.san_skip(
            depth=depth,
            num_heads=1,
            d_model=n,
            norm_placement="none",
            mix=lambda q, k, v, context: (jnp.asarray(weights), None),
            skip_gain=rc.Gains(attention=jnp.asarray(1 - shares)),
            branch_gain=rc.Gains(attention=jnp.asarray(shares)),
        )
        params = draws.parameters(config, bias_scale=0.0)
        identity = jnp.broadcast_to(jnp.eye(n), (depth, 1, n, n))
        params = draws.changed(params, attention={"w_v": identity, "w_o": identity})
        sums = jax.tree.map(np.asarray, rc.path_contributions(params, jnp.eye(n), config))
    stack = np.broadcast_to(weights, (depth, n, n))
    terms = rc.rollout(stack, shares, by_length=True)
    assert np.abs(sums.by_length - terms).max() < 1e-15
    assert np.abs(sums.total - rc.rollout(stack, shares)).max() < 1e-15


CONFIGS = {
    "post": {"skip_gain": 1.3, "branch_gain": 0.4},
    "pre": {"norm_placement": "pre", "branch_gain": rc.Gains(attention=0.6, mlp=0.3)},
    "sandwich": {"norm_placement": "sandwich"},
    "parallel": {"norm_placement": "pre", "parallel": True},
    "looped": {"norm_placement": "pre", "layer_map": (0, 1, 0)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_branch_shares_are_ratios_of_norms_of_what_is_summed(name):
    """The sum is rebuilt from stream and branch: λ x + γ N'(branch), norms written out."""
    config = rc.transformer(3, 2, 8, d_ff=7, **CONFIGS[name])
    params, x = draws.parameters(config), draws.tokens(5, 8)
    trace = rc.apply(params, x, config)
    shares = rc.branch_shares(trace, params, config)
    branch_gain = config.branch_gain
    gains = branch_gain if isinstance(branch_gain, rc.Gains) else rc.Gains(*[branch_gain] * 3)
    before = {"attention": trace.hidden[:-1], "mlp": trace.layers.after_attention}
    for sublayer, stream in before.items():
        branch = np.asarray(getattr(trace, f"{sublayer}_branch"))
        if name == "sandwich":
            norm = getattr(params.layers, f"{sublayer}_branch_norm")
            centred = branch - branch.mean(axis=-1, keepdims=True)
            deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + config.norm_eps)
            branch = centred / deviation * norm.gain[:, None] + norm.bias[:, None]
        skip_norm = np.linalg.norm(config.skip_gain * np.asarray(stream), axis=-1)
        branch_norm = np.linalg.norm(getattr(gains, sublayer) * branch, axis=-1)
        ratios = branch_norm / (skip_norm + branch_norm)
        np.testing.assert_allclose(getattr(shares, sublayer), ratios.mean(axis=-1), rtol=1e-5)
        later = rc.branch_shares(trace, params, config, mask=np.arange(5) > 0)
        np.testing.assert_allclose(getattr(later, sublayer), ratios[:, 1:].mean(-1), rtol=1e-5)
        masked = rc.branch_shares(trace, params, config, mask=np.arange(5) < 3)
        np.testing.assert_allclose(getattr(masked, sublayer), ratios[:, :3].mean(-1), rtol=1e-5)


def test_a_layer_without_a_skip_passes_on_its_branch_alone():
    config = rc.san(2, 2, 8)
    params, x = draws.parameters(config), draws.tokens(5, 8)
    shares = rc.branch_shares(rc.apply(params, x, config), params, config)
    np.testing.assert_array_equal(shares.attention, 1)
    assert shares.mlp is None


COMPUTE = (
    lambda a, s: rc.rollout(a, s),
    lambda a, s: rc.rollout(a, s, by_length=True),
    lambda a, s: rc.rollout(a, s[1]),
    lambda a, s: rc.path_length_law(s),
)


@pytest.mark.parametrize("compute", COMPUTE)
def test_traced_shares_are_those_of_numpy(compute):
    weights = causal_weights(4, 2, 3)
    result = jax.jit(compute)(jnp.asarray(weights), jnp.asarray(SHARES))
    assert isinstance(result, jax.Array)
    np.testing.assert_allclose(result, compute(weights, SHARES), rtol=1e-5)


def test_results_are_of_the_framework_of_their_arguments():
    torch = pytest.importorskip("torch")
    weights = causal_weights(4, 2, 3)
    for compute in COMPUTE:
        in_torch = compute(torch.tensor(weights), torch.tensor(SHARES))
        assert isinstance(in_torch, torch.Tensor)
        assert_close(in_torch.numpy(), compute(weights, SHARES), atol=1e-15)
    assert math.isclose(float(rc.path_length_law(torch.tensor(SHARES)).sum()), 1)


def test_wrong_shapes_and_values_are_named():
    is_refused(r"1\.2", rc.path_length_law, np.array([0.2, 1.2]))
    is_refused(r"-0\.1", rc.path_length_law, np.array([0.2, -0.1]))
    np.testing.assert_array_equal(rc.path_length_law(np.array([0.0, 1.0])), [0, 1, 0])
    np.testing.assert_array_equal(rc.path_length_law(np.zeros((2, 0))), [[1], [1]])
    is_refused(r"\(2, 3, 4\)", rc.rollout, np.ones((2, 3, 4)))
    is_refused(r"shape \(2, 4\)", rc.rollout, np.ones((2, 4)))
    batches = causal_weights(4, 3, 5).reshape(2, 2, 3, 5, 5)
    is_refused(r"shape \(2, 2, 3, 5, 5\)", rc.rollout, list(batches))
    is_refused(r"shape \(2, 1, 3, 5, 5\)", rc.rollout, batches[:, :1])
    is_refused(r"1\.2", rc.path_length_law, jnp.array([0.2, 1.2]))
    is_refused("shares=0.5 is a single number", rc.path_length_law, 0.5)
    for shape in ((3,), (2, 1)):
        shares = np.full(shape, 0.5)
        is_refused("shares have the shape", rc.rollout, causal_weights(2, 1, 3), shares)
    config = rc.san(2, 2, 8)
    params, x = draws.parameters(config), draws.tokens(5, 8)
    trace = rc.apply(params, x, config)
    is_refused("5 tokens", lambda: rc.branch_shares(trace, params, config, mask=np.ones(4, bool)))
    is_refused("2 layers, but config has depth=3", rc.branch_shares, trace, params, rc.san(3, 2, 8))
    is_refused("trace is a TransformerParams, not a", rc.branch_shares, params, trace, config)
    is_refused("params is a TransformerConfig", rc.branch_shares, trace, config, config)
    is_refused("config is a dict, not a Tra", rc.branch_shares, trace, params, {"depth": 2})


@pytest.mark.full
def test_a_rollout_takes_explicit_axes_but_not_for_layers():
    """docs/limits.md says so."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    weights = np.float32(causal_weights(2, 2, 4))
    for axis in range(4):
        places = jax.sharding.PartitionSpec(*[None] * axis, "a")
        spread = jax.device_put(weights, jax.sharding.NamedSharding(mesh, places))
        for compute in (rc.rollout, jax.jit(rc.rollout)):
            if axis:
                assert_close(compute(spread), rc.rollout(weights), atol=1e-6)
            else:
                with pytest.raises(Exception, match=r"sharded dims|out sharding"):
                    compute(spread)
