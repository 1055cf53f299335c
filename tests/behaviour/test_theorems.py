"""What papers say and could hardly fail, on small random networks: see statements.toml."""

import jax
import numpy as np
import pytest

import rank_collapse as rc
from tests.oracles import draws

SEEDS, TOKENS, DEPTH, HEADS, WIDTH = 4, 10, 8, 2, 16


def final_profile(config, seed):
    """Computes log10 of the residual by layer of a random network, [L + 1]."""
    params = draws.parameters(config, seed, bias_scale=0.0, gain_scale=0.0)
    x = draws.normal(TOKENS, WIDTH, seed=100 + seed)
    return rc.log_residual_profile(params, x, config)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(
    "config",
    [
        rc.san(DEPTH, HEADS, WIDTH),
        rc.san(DEPTH, HEADS, WIDTH, norm_placement="post", norm="layer"),
        rc.san_mlp(DEPTH, HEADS, WIDTH),
    ],
    ids=["attention", "with norms", "with MLPs"],
)
def test_the_rate_is_3(config, seed):
    assert float(rc.local_rate(final_profile(config, seed))[-1]) == pytest.approx(3, abs=0.05)


@pytest.mark.full
def test_skips_leave_more_of_the_residual():
    for seed in range(SEEDS):
        without_skips = final_profile(rc.san(DEPTH, HEADS, WIDTH), seed)
        with_skips = final_profile(rc.san_skip(DEPTH, HEADS, WIDTH), seed)
        assert with_skips[-1] > without_skips[-1] + 10


KEEPING = {
    "values of 0": lambda a: {"w_v": 0 * a.w_v},
    "scores of 0": lambda a: {"w_q": 0 * a.w_q},
    "other coordinates": lambda a: {"w_o": a.w_o.at[..., : WIDTH // 2].set(0)},
}


@pytest.mark.parametrize("kind", KEEPING)
def test_infinitely_many_networks_with_skips_lose_nothing(kind, x64):
    """Section 3.1: ‖res(X^l)‖ ≥ ‖res(X)‖ in every layer, whatever the other weights are."""
    config = rc.san_skip(DEPTH, HEADS, WIDTH)
    for seed in range(SEEDS):
        params = draws.parameters(config, seed, weight_scale=2.0, bias_scale=0.0)
        attention = params.layers.attention
        weights = KEEPING[kind](jax.tree.map(jax.numpy.asarray, attention))
        x = np.array(draws.normal(TOKENS, WIDTH, seed=100 + seed))
        x[:, WIDTH // 2 :] = 0  # the heads of "other coordinates" write here
        kept = rc.apply(draws.changed(params, attention=weights), x, config)
        sizes = [rc.composite_norm(rc.residual(hidden)) for hidden in kept.hidden]
        assert min(sizes) >= sizes[0] * (1 - 1e-9), sizes
        if kind == "other coordinates":  # not because the branch is nothing
            assert np.linalg.norm(rc.residual(kept.attention_branch[0])) > 0.1
            changed = rc.apply(params, x, config).hidden
            assert not np.allclose(changed[-1], kept.hidden[-1])


def test_short_paths_have_the_largest_residual():
    config = rc.san_skip(6, 4, WIDTH)
    most = np.argmax([float(count) for count in rc.count_paths(6, 4)])
    for seed in range(SEEDS):
        params = draws.parameters(config, seed, bias_scale=0.0)
        sums = rc.path_contributions(params, draws.tokens(TOKENS, WIDTH), config).by_length
        sums = np.asarray(sums)
        assert np.argmax(np.linalg.norm(sums - sums.mean(1, keepdims=True), axis=(1, 2))) < most


def test_unscaled_products_saturate_and_lose_their_gradients():
    """With d_k = 1024 scaled products have scores of variance 1, unscaled ones of variance d_k."""
    d_k, num_keys = 1024, 64
    q, k = np.random.default_rng(0).standard_normal((2, num_keys, d_k))
    goal = draws.normal(num_keys, num_keys)
    saturated, gradients = {}, {}
    for name, factor in (("unscaled", 1.0), ("scaled", d_k**-0.5)):
        scores = factor * q @ k.T
        weights, pull = jax.vjp(jax.nn.softmax, jax.device_put(scores))
        saturated[name] = np.mean(np.max(weights, axis=1) > 0.99)
        gradients[name] = np.median(np.linalg.norm(pull(goal)[0], axis=1))
    assert saturated["unscaled"] > 0.5 and saturated["scaled"] == 0
    assert gradients["unscaled"] < gradients["scaled"] / 100
