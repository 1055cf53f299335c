"""Sampling and evaluating sets of paths, against one path at a time and against exact sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.paths.enumeration import path_length
from rank_collapse.paths.sets import classify_states, visiting_order
from rank_collapse.paths.steps import SEMANTICS
from tests.oracles import draws
from tests.oracles.path_examples import relative
from tests.oracles.path_sums import Oracle, enumerate_paths
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

N, D = 4, 6


def network(**fields):
    config = rc.transformer(3, 2, D, **({"mlp": "gelu", "d_ff": 7, "skip_gain": 0.8} | fields))
    return config, draws.parameters(config), draws.tokens(N, D)


NETWORKS = {
    "post-norm with MLP": {"final_norm": True},
    "sandwich, final norm": {"norm_placement": "sandwich", "final_norm": True, "mlp": "swiglu"},
    "parallel experts, windows, capped": {
        "norm_placement": "pre",
        "final_norm": True,
        "parallel": True,
        "d_ff": 8,
        "num_experts": 4,
        "experts_per_token": 2,
        "windows": (1, 0, 1),
        "score_cap": 0.5,
        "first_norm": False,
        "position": "rotary",
        "d_qk": 4,
        "rotary_width": 2,
        "local_theta": 5.0,
    },
    "shared layers, relative positions": {
        "layer_map": (0, 1, 0),
        "position": "relative_key",
        "mlp": "none",
        "norm_placement": "none",
    },
}


def sample_sets(key, lengths, sets, size):
    """Samples paths of three layers of two heads, in one program."""
    sample = jax.jit(lambda key: rc.paths.sample_path_sets(key, lengths, sets, size, 3, 2))
    return np.asarray(sample(key))


@pytest.mark.full
def test_sampled_paths_have_their_length_and_are_uniform():
    paths = sample_sets(jax.random.key(0), (0, 1, 2, 3), 2, 4000)
    assert paths.shape == (4, 2, 4000, 3)
    assert ((paths < 2).sum(axis=-1) == np.arange(4)[:, None, None]).all()
    flat = paths[2].reshape(-1, 3) @ [9, 3, 1]
    _, counts = np.unique(flat, return_counts=True)
    assert len(counts) == 12  # C(3, 2) 2^2
    expected = len(flat) / 12
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 31.3  # 99.9 percentile of chi squared with 11 degrees of freedom
    assert not np.array_equal(paths[2, 0], paths[2, 1])
    again = sample_sets(jax.random.key(0), (2,), 1, 4000)
    np.testing.assert_array_equal(again[0, 0], paths[2, 0])


def test_lengths_and_heads_have_draws_of_their_own():
    """The layer that length 1 takes and the one that length 2 skips are independent: all 9 pairs
    are equally frequent, by chi squared with 8 degrees of freedom (99.9 percentile)."""
    key = jax.random.key(1)
    one, two = sample_sets(key, (1, 2), 1, 3600)[:, 0]
    counts = np.bincount(3 * (one < 2).argmax(axis=1) + (two == 2).argmax(axis=1), minlength=9)
    assert ((counts - 400) ** 2 / 400).sum() < 26.1
    # the key is split, not used itself
    path = rc.paths.sample_path(key, 20, 20, 7)
    assert not np.array_equal(path, jax.random.randint(key, (20,), 0, 7))


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(NETWORKS, "post-norm with MLP"))
def test_sets_equal_one_path_at_a_time(name):
    """Shared beginnings, sorted visits: the same sums, in the order the sets were given."""
    config, params, x = network(**NETWORKS[name])
    paths = np.random.default_rng(2).integers(-1, 3, (2, 3, 4, 3))
    mask = np.arange(N) < N - 1
    for semantics in SEMANTICS:
        single = jax.jit(
            lambda path, s=semantics: rc.paths.path_state(
                params, x, config, path, semantics=s, mask=mask
            )
        )
        by_path = np.stack([single(path) for path in paths.reshape(-1, 3)])
        by_path = by_path.reshape(2, 3, 4, N, D)
        sets = jax.jit(
            lambda p, s=semantics: rc.paths.path_set_states(
                params, x, config, p, semantics=s, mask=mask
            )
        )(paths)
        assert relative(sets, by_path.sum(axis=2)) < 1e-5
        keep = np.array([[1, 0, 1, 1], [0, 1, 0, 0]], bool)[:, None]  # of the sets of each length
        members = jax.jit(
            lambda p, chosen, s=semantics: rc.paths.path_set_states(
                params, x, config, p, semantics=s, mask=mask, keep=chosen
            )
        )(paths, keep)
        assert relative(members, (by_path * keep[..., None, None]).sum(axis=2)) < 1e-5


def test_shared_beginnings_are_visited_once():
    paths = np.random.default_rng(3).integers(-1, 3, (40, 4))
    order, first = visiting_order(jnp.asarray(paths))
    beginnings = {tuple(path[: l + 1]) for path in paths for l in range(4)}
    assert int((4 - first).sum()) == len(beginnings) < paths.size
    assert sorted(np.asarray(order)) == list(range(40))


def test_a_frozen_path_that_skips_is_0_where_the_network_has_no_skip():
    config, params, x = network(mlp="none", norm_placement="none", attention_skip=False)
    paths = np.array([[2, 2, 2], [0, 2, 1], [0, 1, 0]])[:, None]
    states = rc.paths.path_set_states(params, x, config, paths, semantics="frozen")
    assert np.any(states, axis=(1, 2)).tolist() == [False, False, True]


@pytest.mark.full
@pytest.mark.parametrize("name", full_but(NETWORKS, "post-norm with MLP"))
def test_frozen_paths_sum_to_the_exact_contributions(name, x64):
    config, params, x = network(**NETWORKS[name])
    assert x.dtype == jnp.float64
    exact, _ = jax.jit(lambda p: rc.path_contributions(p, x, config))(params)
    # Every path, and the one of all heads, in sets of one path each.
    chosen = {k: enumerate_paths(3, 2, length=k) for k in range(4)}
    paths = np.concatenate([*chosen.values(), np.full((1, 3), -1)])
    states = jax.jit(
        lambda p: rc.paths.path_set_states(params, x, config, p[:, None], semantics="frozen")
    )(jnp.asarray(paths))
    lengths = path_length(paths[:-1], 2)
    for k in range(4):
        assert relative(states[:-1][lengths == k].sum(axis=0), exact[k]) < 1e-12
    assert relative(states[-1], exact[3]) < 1e-12


MIXING = {  # [L, h] each, or [L]
    "identity": np.array([[0.3, -0.2], [0.5, 0.1], [0.2, 0.4]]),
    "weights": np.array([[0.9, 0.7], [-0.6, 1.1], [0.5, 0.8]]),
    "uniform": np.array([0.4, -0.3, 0.2]),
}


def recompute_by_hand(params, x, path, mask, bias):
    """Computes a recomputed path of attention with skips and no norms, of gains 0.8 and 1.

    Weights are mixed by `MIXING`, and layers share parameters by the map (0, 1, 0).
    """
    alpha, beta, gamma = (a if a.ndim == 2 else a[:, None].repeat(2, 1) for a in MIXING.values())
    for l, h in enumerate(path):
        if h == 2:
            continue
        p = jax.tree.map(lambda a, row=l % 2: np.asarray(a[row]), params.layers.attention)
        scores = (x @ p.w_q[h] + p.b_q[h]) @ (x @ p.w_k[h] + p.b_k[h]).T
        scores = np.where(mask[h], scores / np.sqrt(p.w_q.shape[-1]) + bias[h], -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        uniform = mask[h] / mask[h].sum(axis=1, keepdims=True)
        mixed = alpha[l, h] * np.eye(N) + beta[l, h] * weights + gamma[l, h] * uniform
        x = 0.8 * x + mixed @ (x @ p.w_v[h] + p.b_v[h]) @ p.w_o[h] + p.b_o
    return x


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_each_head_has_its_own_mask_bias_and_mixing(semantics, x64):
    fields = {"mixing": rc.network.Mixing(**MIXING), "layer_map": (0, 1, 0)}
    config, params, x = network(mlp="none", norm_placement="none", **fields)
    rng = np.random.default_rng(0)
    mask = (rng.random((2, N, N)) < 0.5) | np.eye(N, dtype=bool)
    inputs = {"mask": mask, "bias": rng.standard_normal((2, N, N))}
    assert (mask[0] != mask[1]).any()
    paths = enumerate_paths(3, 2)
    arguments = params, x, config, paths[:, None]
    states = rc.paths.path_set_states(*arguments, semantics=semantics, **inputs)
    if semantics == "frozen":
        oracle = Oracle(params, rc.apply(params, x, config, **inputs), config)
        heads = [["skip" if h == 2 else h for h in path] for path in paths]
        expected = [oracle.walk(oracle.trace.hidden[0], 0, path, [None] * 3) for path in heads]
    else:
        expected = [recompute_by_hand(params, np.asarray(x), path, **inputs) for path in paths]
        np.testing.assert_array_equal(rc.paths.path_set_states(*arguments, **inputs), states)
    assert relative(states, expected) < 1e-12


def test_a_recomputed_path_is_a_network_of_one_head():
    """A path of all heads 1 is the network with the other head's output projection at zero."""
    config, params, x = network(position="relative_key", qk_norm="head")
    w_o = draws.with_value(params.layers.attention.w_o, np.s_[:, 0], 0.0)
    one_head = draws.changed(params, attention={"w_o": w_o})
    # b_v of the removed head adds nothing once its projection is zero
    segments = np.array([0, 1, 1, 0])
    output = jax.jit(
        lambda p, skip: (
            rc.apply(p, x, config.replace(attention_skip=skip), segments=segments).output
        ),
        static_argnums=1,
    )
    state = jax.jit(
        lambda path, bare: rc.paths.path_state(
            params, x, config, path, no_sub_path=bare, segments=segments
        ),
        static_argnums=1,
    )
    path = jnp.array([1, 1, 1])
    assert relative(state(path, False), output(one_head, True)) < 1e-5
    assert relative(state(-path, False), output(params, True)) < 1e-5
    np.testing.assert_array_equal(state(2 * path, False), x)
    # bare: the head alone, under a LayerNorm without gain and bias
    norm = params.layers.attention_norm
    plain_norm = {"gain": jnp.ones_like(norm.gain), "bias": jnp.zeros_like(norm.bias)}
    bare = draws.changed(one_head, attention_norm=plain_norm)
    assert relative(state(path, True), output(bare, False)) < 1e-5


@pytest.mark.parametrize("placement", ["pre", "both"])
def test_a_path_without_sub_path_is_a_network_without_the_skip_of_attention(placement):
    """After the sum its norm has neither gain nor bias."""
    config, params, x = network(norm_placement=placement)
    attention = {"w_o": draws.with_value(params.layers.attention.w_o, np.s_[:, 0], 0.0)}
    norm = {"gain": np.ones((3, D)), "bias": np.zeros((3, D))} if placement == "both" else {}
    one_head = draws.changed(params, attention=attention, attention_norm=norm)
    bare = rc.paths.path_state(params, x, config, np.full(3, 1), no_sub_path=True)
    expected = rc.apply(one_head, x, config.replace(attention_skip=False)).hidden[-1]
    assert relative(bare, expected) < 1e-5


def test_an_mlp_beside_attention_is_on_the_path_of_the_skip():
    """Of one layer without norms and biases, its MLP linear: the path is x + x W_in W_out."""
    config = rc.transformer(1, 2, D, mlp="identity", parallel=True, norm_placement="none")
    params, x = draws.parameters(config, bias_scale=0.0), draws.tokens(N, D)
    (skip,) = rc.paths.path_set_states(params, x, config, jnp.array([[[2]]]), semantics="frozen")
    w_in, w_out = params.layers.mlp.w_in[0], params.layers.mlp.w_out[0]
    assert_close(skip, x + x @ w_in @ w_out, atol=1e-5)


def test_logits_ignore_scale_and_common_shift_unless_asked():
    classifier = (draws.normal(D, 3), jnp.array([0.5, -1.0, 2.0]))
    w, b = (np.asarray(a) for a in classifier)
    x = np.asarray(draws.normal(2, N, D))
    unit = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
    assert_close(classify_states(classifier, x), unit @ w + b, atol=1e-5)
    assert_close(classify_states(classifier, 7 * x + 3), unit @ w + b, atol=1e-5)
    logits = classify_states(classifier, x[0], normalise=False)
    assert_close(logits, x[0] @ w + b, atol=1e-5)


def test_logits_of_a_set_take_the_options_of_its_states():
    config, params, x = network(mlp="none")
    paths, classifier = np.array([[[0, 1, 2], [1, 1, 0]]]), (np.eye(D), np.zeros(D))
    options = {"semantics": "frozen", "mask": np.arange(N) < 3, "keep": np.array([True, False])}
    states = rc.paths.path_set_states(params, x, config, paths, **options)
    logits = rc.paths.path_set_logits(params, x, config, paths, classifier, **options)
    np.testing.assert_allclose(logits, classify_states(classifier, states), rtol=1e-6)
    alone = rc.paths.path_set_states(params, x, config, paths[:, :1], **options | {"keep": None})
    np.testing.assert_allclose(states, alone, rtol=1e-6)


@parametrize_refusals(
    [
        (
            lambda c, p, x: rc.paths.sample_path(jax.random.key(0), 4, 3, 2),
            "length=4 is not a whole number from 0 to 3",
        ),
        (
            lambda c, p, x: rc.paths.sample_path(jax.random.key(0), -1, 3, 2),
            "length=-1 is not a whole number from 0 to 3",
        ),
        (lambda c, p, x: rc.paths.sample_path_sets(jax.random.key(0), [9], 1, 1, 3, 2), "length=9"),
        (lambda c, p, x: rc.paths.path_state(p, x, c, np.array([0, 1])), "depth=3"),
        (lambda c, p, x: rc.paths.path_state(p, x, c, np.array([0, 1, 5])), "choice 5"),
        (
            lambda c, p, x: rc.paths.path_set_states(p, x, c, np.array([0, 1, 1])),
            r"sets \[\.\.\., p, L",
        ),
        (
            lambda c, p, x: rc.paths.path_set_states(p, x, c, np.zeros((2, 0, 3), int)),
            r"shape \(2, 0, 3\) are not sets \[\.\.\., p, L",
        ),
        (
            lambda c, p, x: rc.paths.path_state(p, x, c, np.array([0, 1, 1]), semantics="thawed"),
            "semantics='thawed' is not one of",
        ),
        (
            lambda c, p, x: rc.paths.path_state(
                p, x, c.replace(cross_attention=True), np.array([0, 1, 1])
            ),
            "cross_attention=True",
        ),
    ]
)
def test_bad_input_is_named(arguments, message):
    (call,) = arguments
    is_refused(message, lambda: call(*network(mlp="none")))


@pytest.mark.full
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_reverse_gradients_are_those_of_single_paths(x64, semantics):
    config, params, x = network()
    paths = np.array([[0, 1, 2], [0, 0, 1], [0, 1, 1]])

    def sum_set(x):
        return rc.paths.path_set_states(params, x, config, paths[None], semantics=semantics)[0]

    def sum_single_paths(x):
        return sum(rc.paths.path_state(params, x, config, p, semantics=semantics) for p in paths)

    set_gradient, expected_gradient = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x) for f in (sum_set, sum_single_paths)
    )
    assert_close(set_gradient, expected_gradient, atol=1e-10)


@pytest.mark.full
def test_sums_estimated_from_sampled_paths_are_unbiased():
    """Over many sets: |P_k| times the mean of sampled terms, its mean and its variance."""
    config, params, x = network(mlp="none")
    all_paths = jnp.asarray(enumerate_paths(3, 2, length=2))
    exact = jax.jit(lambda p: rc.path_contributions(p, x, config).by_length[2])(params)
    terms = jax.jit(
        lambda p: rc.paths.path_set_states(params, x, config, p[:, None], semantics="frozen")
    )(all_paths)
    assert relative(terms.sum(axis=0), exact) < 1e-5
    sets, size = 400, 20
    paths = rc.paths.sample_path_sets(jax.random.key(5), [2], sets, size, 3, 2)[0]
    index = (paths[:, :, None] == all_paths[None, None]).all(axis=-1).argmax(axis=-1)
    estimates = 12 * np.asarray(terms)[index].mean(axis=1)
    variance = 12**2 * np.var(terms, axis=0) / size
    # Averages over entries, which are correlated: as uncertain as one entry's at most.
    bias = np.mean((estimates.mean(axis=0) - exact) / np.sqrt(variance / sets))
    assert abs(bias) < 4
    spread = np.mean(np.mean(np.square(estimates - exact[None]), axis=0) / variance)
    assert abs(spread - 1) < 4 * np.sqrt(2 / sets)
