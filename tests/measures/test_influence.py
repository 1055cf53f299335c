"""Layers' influence and removal, and heads' attention, against the same from whole traces."""

import draws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from path_examples import chain_effects
from refusals import refused

import rank_collapse as rc
from rank_collapse.measures.attention import attention_profile
from rank_collapse.measures.influence import layer_influence, layer_removal, settled
from rank_collapse.network.layers import norm
from rank_collapse.paths.chains import branch_sizes

L, N, D = 4, 6, 8
CONFIG = rc.TransformerConfig(
    depth=L,
    num_heads=2,
    d_model=D,
    d_ff=11,
    mlp="gelu",
    attention_skip=True,
    mlp_skip=True,
    norm_placement="pre",
    final_norm=True,
)
MASK = jnp.arange(N) < N - 2


@pytest.fixture(scope="module")
def network():
    params, x = draws.parameters(CONFIG, 0, 2.0, 0.1), draws.tokens(N, D, shift=0.0)
    return params, x, rc.apply(params, x, CONFIG, mask=MASK)


@pytest.mark.parametrize(
    ("moved", "influence", "angle"), [(0, 0, 0), (1, (3 - 0.5**0.5) / 3, (0.5 + 0.5 + 0.25) / 3)]
)
def test_a_token_that_is_zero_is_at_right_angles_to_others_and_at_none_to_itself(
    moved, influence, angle
):
    """0 → (−3, −4), (3, 4) → 0 and (−3, 1) → (−6, −3), of cosines 0, 0 and 1/√2."""
    config = rc.san(1, 1, 2, attention_skip=True)
    params = jax.tree.map(jnp.zeros_like, rc.init(jax.random.key(0), config))
    params = draws.changed(params, attention={"b_o": moved * jnp.array([[-3.0, -4.0]])})
    found = layer_influence(params, jnp.array([[0.0, 0.0], [3.0, 4.0], [-3.0, 1.0]]), config)
    np.testing.assert_allclose(found["block_influence"], [influence], atol=1e-6)
    np.testing.assert_allclose(found["angle"], [[0, angle], [angle, 0]], atol=1e-6)


def without(params, config, s, size=1):
    kept = np.delete(np.arange(L), slice(s, s + size))
    fewer = params.replace(layers=jax.tree.map(lambda a: a[kept], params.layers))
    return fewer, config.replace(depth=L - size)


def test_influence_against_the_trace(network):
    params, x, trace = network
    found = layer_influence(params, x, CONFIG, mask=MASK)
    hidden = np.asarray(trace.hidden, float)[:, np.asarray(MASK)]
    unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    cosine = np.clip(np.einsum("lnd,mnd->lmn", unit, unit), -1, 1)
    np.testing.assert_allclose(found["angle"], np.arccos(cosine).mean(-1) / np.pi, atol=1e-4)
    steps = cosine[np.arange(L), np.arange(1, L + 1)].mean(-1)
    np.testing.assert_allclose(found["block_influence"], 1 - steps, atol=1e-6)
    assert np.all(np.diag(found["angle"]) == 0)

    np.testing.assert_allclose(found["stream"], np.linalg.norm(hidden, axis=-1).mean(-1), rtol=1e-5)


GAINS = {
    "plain": {},
    "sandwich": {"norm_placement": "sandwich"},
    "branch": {"norm_placement": "branch"},
    "gains": {"branch_gain": 0.1, "skip_gain": rc.Gains(attention=1.5, mlp=0.7)},
    "layer scale": {"learned_branch_gain": 0.3, "learned_per_feature": True},
    "parallel": {"parallel": True, "branch_gain": 0.1},
}


@pytest.mark.parametrize("kind", GAINS)
def test_ratios_and_sizes_are_of_what_the_states_gain(kind):
    """The difference of the actual states, of a sandwich, gains, LayerScale: what is added."""
    config = CONFIG.replace(**GAINS[kind])
    params = draws.parameters(config, 0, 2.0, 0.1)
    noise = np.random.default_rng(0)
    params = params.replace(
        layers=jax.tree.map(lambda a: a * noise.uniform(0.5, 1.5, a.shape), params.layers)
    )
    x = jax.random.normal(jax.random.key(1), (N, D))
    trace = rc.apply(params, x, config, mask=MASK)
    keep, after = np.asarray(MASK), trace.layers.after_attention
    streams = {"attention": trace.hidden[:-1], "mlp": after}
    if kind == "gains":
        streams = {"attention": 1.5 * trace.hidden[:-1], "mlp": 0.7 * after}
    states = {"attention": after, "mlp": trace.hidden[1:]}
    added = {name: np.asarray(states[name] - streams[name])[:, keep] for name in states}
    streams = {name: np.asarray(a)[:, keep] for name, a in streams.items()}
    found = layer_influence(params, x, config, mask=MASK)
    for name in added:
        expected = np.linalg.norm(added[name], axis=-1) / np.linalg.norm(streams[name], axis=-1)
        np.testing.assert_allclose(found[f"{name}_ratio"], expected.mean(-1), rtol=1e-4)
    # α is made of the same two sides, whole matrices of them
    expected = [jax.vmap(rc.composite_norm)(a["attention"]) for a in (streams, added)]
    np.testing.assert_allclose(branch_sizes(params, trace, config, mask=MASK), expected, rtol=1e-4)
    sizes = chain_effects(params, x, config, mask=MASK)
    np.testing.assert_allclose((sizes["skip"], sizes["branch"]), expected, rtol=1e-4)


def test_removal_against_networks_without_the_layer(network):
    params, x, trace = network
    found = layer_removal(params, x, CONFIG, mask=MASK)
    keep = np.asarray(MASK)
    change = np.diff(np.asarray(trace.hidden), axis=0)[:, keep]
    later = np.zeros((L, L))
    for s in range(L):
        own = rc.apply(*(lambda p, c: (p, x, c))(*without(params, CONFIG, s)), mask=MASK)
        np.testing.assert_allclose(found["outputs"][s], own.output, atol=2e-6)
        moved = np.diff(np.asarray(own.hidden), axis=0)[:, keep]
        gap = np.linalg.norm(moved[s:] - change[s + 1 :], axis=(1, 2))
        later[s, s + 1 :] = gap / np.linalg.norm(change[s + 1 :], axis=(1, 2))
        whole, rest = np.asarray(trace.output)[keep], np.asarray(own.output)[keep]
        dots = (
            (whole * rest).sum(-1) / np.linalg.norm(whole, axis=-1) / np.linalg.norm(rest, axis=-1)
        )
        np.testing.assert_allclose(found["cosine"][s], dots.mean(), atol=1e-6)
        error = np.linalg.norm(whole - rest) / np.linalg.norm(whole)
        np.testing.assert_allclose(found["error"][s], error, rtol=1e-5)
    np.testing.assert_allclose(found["later"], later, atol=1e-5)
    assert later[0, 1] > 0.01


@pytest.mark.parametrize("size", [2, L])
def test_removal_of_blocks_against_shorter_networks(network, size):
    params, x, trace = network
    found = layer_removal(params, x, CONFIG, size=size, mask=MASK)
    assert found["later"].shape == (L - size + 1, L)
    for s in range(L - size + 1):
        own = norm(params.final_norm, x, CONFIG.norm_kind, CONFIG.norm_eps)
        if size < L:
            fewer, config = without(params, CONFIG, s, size)
            own = rc.apply(fewer, x, config, mask=MASK).output
        np.testing.assert_allclose(found["outputs"][s], own, atol=2e-6)
        whole, rest = (np.asarray(a)[np.asarray(MASK)] for a in (trace.output, own))
        error = np.linalg.norm(whole - rest) / np.linalg.norm(whole)
        np.testing.assert_allclose(found["error"][s], error, rtol=1e-5)
    assert not found["later"][0, :size].any()


test_a_block_that_is_no_block = refused(
    [(0, f"size=0 is not between 1 and depth={L}"), (L + 1, "size=5 is not between 1 and depth=4")],
    lambda size: layer_removal(draws.parameters(CONFIG), jnp.ones((N, D)), CONFIG, size=size),
)


def test_settled_is_where_it_stays_enough():
    enough = [
        [False, True, False, True, True],
        [True] * 5,
        [False] * 5,
        [True, False, True, False, False],
    ]
    assert settled(enough).tolist() == [3, 0, 4, 4]


def test_the_depth_of_a_looped_network():
    """States aˡ v + w settle at the first l with aˡ − aᴸ ≤ ε max_k ‖Xᵏ‖/‖v‖; and what one layer
    of attention, applied again and again, keeps of the residual."""
    v, w = np.array([[3.0, 4.0]]), np.array([[0.0, 20.0]])
    states = np.stack([0.5**l * v + w for l in range(11)])
    expected = next(l for l in range(11) if 5 * (0.5**l - 0.5**10) <= 0.01 * np.hypot(3, 24))
    assert expected == 5 == rc.effective_depth(states)
    assert jax.jit(rc.effective_depth)(jnp.asarray(states[::2])) == 3
    returns = states.copy()
    returns[8] = 0  # as the last at 5, and away again
    assert rc.effective_depth(returns) == 9
    assert rc.effective_depth(np.ones((4, 2, 2))) == 0 and rc.effective_depth([1.0, 1, 1, 0]) == 3
    returns[3] = np.nan
    assert rc.effective_depth(returns) == 10  # no depth is known of states that overflowed
    assert [int(rc.effective_depth([x, 1, 1, 1])) for x in (jnp.inf, jnp.nan, 1.0)] == [3, 3, 0]
    large = jnp.asarray(1e30 * states, jnp.float32)  # whose squares overflow
    assert rc.effective_depth(large) == 5 and rc.effective_depth(jnp.zeros((4, 2))) == 0
    config = rc.san(12, 1, D, layer_map=(0,) * 12)
    params = rc.init(jax.random.key(0), config)
    states = [jax.random.normal(jax.random.key(1), (N, D))]
    loop = jax.jit(lambda x: rc.apply(params, x, config.replace(depth=1, layer_map=())).output)
    for _ in range(12):
        states.append(loop(states[-1]))
    kept = [float(rc.residual_ratio(x)) for x in states]
    settled = 1 + max(l for l, own in enumerate(kept) if abs(own - kept[-1]) > 0.01 * max(kept))
    hidden = rc.apply(params, states[0], config).hidden
    assert rc.effective_depth(rc.residual_ratio(hidden)) == settled < 12


def test_attention_that_is_uniform_and_attention_that_is_not(network):
    params, x, trace = network
    w_q = jnp.zeros_like(params.layers.attention.w_q)
    blind = draws.changed(params, attention={"w_q": w_q, "b_q": None})
    found = attention_profile(blind, x, CONFIG, mask=MASK)
    shares = [found[name] for name in ("largest_weight", "largest_column", "first_column")]
    np.testing.assert_allclose([np.exp(-found["entropy"]), *shares], 1 / MASK.sum(), rtol=1e-5)
    found = attention_profile(params, x, CONFIG, mask=MASK)
    weights = np.asarray(trace.attention)[:, :, np.asarray(MASK)]
    np.testing.assert_allclose(found["first_column"], weights[..., 0].mean(-1), rtol=1e-5)
    np.testing.assert_allclose(found["largest_column"], weights.mean(-2).max(-1), rtol=1e-5)
