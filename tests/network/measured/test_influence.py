"""Influence, removal and attention of layers; updates, gradients, dependency: by definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from experiments.train.path_sizes import branch_sizes
from rank_collapse.network.inputs import prepare_inputs
from rank_collapse.network.layers import apply_norm
from rank_collapse.network.measured.heads import measure_heads
from rank_collapse.network.measured.influence import (
    branch_share,
    find_settling_index,
    layer_influence,
    layer_removal,
    mean_cosine,
)
from rank_collapse.network.passes import LayerMeasure, States, replay, run_pass
from rank_collapse.network.residual import ResidualSpec
from rank_collapse.network.walk import SublayerValues
from tests.oracles import draws
from tests.oracles.path_examples import heads_in_memory
from tests.support.closeness import assert_close, near
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

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
MASK = np.array([0, 1, 0, 1, 1, 0], bool)


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
    params = jax.tree.map(np.zeros_like, draws.parameters(config))
    params = draws.changed(params, attention={"b_o": moved * np.float32([[-3, -4]])})
    influence_measures = layer_influence(params, np.float32([[0, 0], [3, 4], [-3, 1]]), config)
    assert_close(influence_measures["block_influence"], [influence], atol=1e-6)
    assert_close(influence_measures["angle"], [[0, angle], [angle, 0]], atol=1e-6)
    assert all(np.isfinite(measure).all() for measure in influence_measures.values())
    assert not any(name.startswith("mlp") for name in influence_measures)


def test_a_share_is_that_of_the_two_sides_of_the_sum():
    """‖γ N'(a)‖/(‖λ x‖ + ‖γ N'(a)‖); 1 without a skip, and 0 where both sides are 0."""
    x, a = jnp.array([[3.0, 4.0], [0, 0], [0, 0]]), jnp.array([[6.0, 8.0], [1, 0], [0, 0]])
    spec = ResidualSpec(None, None, 2.0, 0.5, "attention", True, "pre", "layer", 1e-12)
    for change, shares in (
        ({}, [5 / 15, 1, 0]),
        ({"skip": False}, [1, 1, 0]),
        # LayerNorm makes (6, 8) to (−1, 1) and (1, 0) to (1, −1)
        ({"placement": "branch"}, [2**-0.5 / (10 + 2**-0.5), 1, 0]),
    ):
        values = SublayerValues(spec.replace(**change), x, None, a, None, None, None)
        np.testing.assert_allclose(branch_share(values), shares, rtol=1e-5)


def remove_layers(params, config, s, size=1):
    remaining_layers = np.delete(np.arange(L), slice(s, s + size))
    layers = jax.tree.map(lambda a: np.asarray(a)[remaining_layers], params.layers)
    fewer = params.replace(layers=layers)
    return fewer, config.replace(depth=L - size)


@pytest.mark.full
def test_influence_against_the_trace(network):
    params, x, trace = network
    influence = layer_influence(params, x, CONFIG, mask=MASK)
    hidden = np.asarray(trace.hidden, float)[:, np.asarray(MASK)]
    unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    cosine = np.clip(np.einsum("lnd,mnd->lmn", unit, unit), -1, 1)
    assert_close(influence["angle"], np.arccos(cosine).mean(-1) / np.pi, atol=1e-4)
    assert_close(influence["last_angle"], np.arccos(cosine[..., -1]) / np.pi, atol=1e-4)
    steps = cosine[np.arange(L), np.arange(1, L + 1)].mean(-1)
    assert_close(influence["block_influence"], 1 - steps, atol=1e-6)
    assert np.all(np.diag(influence["angle"]) == 0)
    branches = {"attention": trace.attention_branch, "mlp": trace.mlp_branch}
    streams = {"attention": trace.hidden[:-1], "mlp": trace.layers.after_attention}
    pairs = {kind: (branches[kind], streams[kind]) for kind in branches}
    pairs["layer"] = np.diff(np.asarray(trace.hidden), axis=0), trace.hidden[:-1]
    for kind, pair in pairs.items():
        branch, stream = (np.asarray(a, float)[:, MASK] for a in pair)
        lengths = [np.linalg.norm(a, axis=-1) for a in (branch, stream)]
        cosines = (branch * stream).sum(-1) / np.prod(lengths, axis=0)
        assert_close(influence[f"{kind}_cosine"], cosines.mean(-1), atol=1e-5)
        if kind != "layer":
            ratios = lengths[0] / lengths[1]
            np.testing.assert_allclose(influence[f"{kind}_ratio"], ratios.mean(-1), rtol=1e-4)
        if kind == "attention":
            shares = (lengths[0] / np.add(*lengths)).mean(-1)
            np.testing.assert_allclose(influence["attention_share"], shares, rtol=1e-4)
    assert len(influence) == 10
    decoder = CONFIG.replace(cross_attention=True)  # of the attention to a memory there is nothing
    params = draws.parameters(decoder)
    shapes = jax.eval_shape(lambda: layer_influence(params, x, decoder, memory=x))
    assert shapes.keys() == influence.keys()
    np.testing.assert_allclose(
        influence["stream"], np.linalg.norm(hidden, axis=-1).mean(-1), rtol=1e-5
    )


GAINS = {
    "plain": {},
    "sandwich": {"norm_placement": "sandwich"},
    "branch": {"norm_placement": "branch"},
    "gains": {"branch_gain": 0.1, "skip_gain": rc.Gains(attention=1.5, mlp=0.7)},
    "layer scale": {"learned_branch_gain": 0.3, "learned_per_feature": True},
    "parallel": {"parallel": True, "branch_gain": 0.1},
}


@pytest.mark.parametrize("kind", full_but(GAINS, "sandwich"))
def test_ratios_and_sizes_are_of_what_the_states_gain(kind):
    """Branches are differences of the states, also under sandwich norms, gains and LayerScale."""
    config = CONFIG.replace(**GAINS[kind])
    params = draws.parameters(config, 0, 2.0, 0.1)
    noise = np.random.default_rng(0)
    scaled = jax.tree.map(
        lambda a: np.asarray(a) * np.float32(noise.uniform(0.5, 1.5, a.shape)), params.layers
    )
    params = params.replace(layers=scaled)
    x = draws.normal(N, D)
    trace = rc.apply(params, x, config, mask=MASK)
    keep, after = np.asarray(MASK), trace.layers.after_attention
    streams = {"attention": trace.hidden[:-1], "mlp": after}
    if kind == "gains":
        streams = {"attention": 1.5 * trace.hidden[:-1], "mlp": 0.7 * after}
    states = {"attention": after, "mlp": trace.hidden[1:]}
    branches = {name: np.asarray(states[name] - streams[name])[:, keep] for name in states}
    streams = {name: np.asarray(a)[:, keep] for name, a in streams.items()}
    influence = layer_influence(params, x, config, mask=MASK)
    for name in branches:
        expected = np.linalg.norm(branches[name], axis=-1) / np.linalg.norm(streams[name], axis=-1)
        np.testing.assert_allclose(influence[f"{name}_ratio"], expected.mean(-1), rtol=1e-4)
    share = rc.branch_shares(trace, params, config, mask=MASK).attention
    np.testing.assert_allclose(influence["attention_share"], share, rtol=1e-4)
    # α is made of the same two sides, whole matrices of them
    expected = [rc.composite_norm(np.asarray(a["attention"])) for a in (streams, branches)]
    np.testing.assert_allclose(branch_sizes(params, trace, config, mask=MASK), expected, rtol=1e-4)


normalise = jax.jit(lambda norm, x: apply_norm(norm, x, CONFIG.norm, CONFIG.norm_eps))


@pytest.mark.parametrize("size", [1, 2, L])
def test_removal_against_networks_without_the_layers(network, size):
    params, x, trace = network
    removal = layer_removal(params, x, CONFIG, size=size, mask=MASK)
    keep = np.asarray(MASK)
    change, output = np.diff(np.asarray(trace.hidden), axis=0)[:, keep], np.asarray(trace.output)
    later, most = np.zeros((2, L - size + 1, L))
    for s in range(L - size + 1):
        shorter = normalise(params.final_norm, x)
        if size < L:
            fewer, config = remove_layers(params, CONFIG, s, size)
            trace = rc.apply(fewer, x, config, mask=MASK)
            shorter, moved = trace.output, np.diff(np.asarray(trace.hidden), axis=0)[s:, keep]
            gap = np.linalg.norm(moved - change[s + size :], axis=(1, 2))
            later[s, s + size :] = gap / np.linalg.norm(change[s + size :], axis=(1, 2))
            most[s, s + size :] = compute_largest_change(moved, change[s + size :])
        assert_close(removal["outputs"][s], shorter, atol=2e-6)
        ends = output[keep], np.asarray(shorter)[keep]
        lengths = np.prod([np.linalg.norm(a, axis=-1) for a in ends], axis=0)
        cosine = (np.prod(ends, axis=0).sum(-1) / lengths).mean()
        assert_close(removal["cosine"][s], cosine, atol=1e-6)
        error = np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(ends[0])
        np.testing.assert_allclose(removal["error"][s], error, rtol=1e-5)
    assert_close(removal["later"], later, atol=1e-5)
    assert_close(removal["later_most"], most, atol=1e-5)
    assert size == L or later[0, size] > 0.01


def compute_largest_change(moved, change):
    """Computes the largest ‖moved − change‖/‖change‖ over tokens."""
    return (np.linalg.norm(moved - change, axis=-1) / np.linalg.norm(change, axis=-1)).max(-1)


@pytest.mark.full
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_spared_token_keeps_the_layers_that_are_removed(network, size):
    params, x, _ = network
    mask = jnp.arange(N) > 1  # the first token that exists is the third
    hidden = np.asarray(rc.apply(params, x, CONFIG, mask=mask).hidden)
    removal = layer_removal(params, x, CONFIG, size=size, spare=1, mask=mask)
    change = np.diff(hidden, axis=0)[:, 2:]
    for s in range(L - size):
        state = hidden[s].copy()
        state[2] = hidden[s + size, 2]
        later_layers = params.replace(
            layers=jax.tree.map(lambda a, s=s: a[s + size :], params.layers)
        )
        shorter = rc.apply(later_layers, state, CONFIG.replace(depth=L - s - size), mask=mask)
        assert_close(removal["outputs"][s], shorter.output, atol=2e-6)
        moved = np.diff(np.asarray(shorter.hidden), axis=0)[:, 2:]
        expected = compute_largest_change(moved, change[s + size :])
        np.testing.assert_allclose(removal["later_most"][s, s + size :], expected, rtol=1e-4)


@parametrize_refusals(
    [(size, f"size={size} is not a whole number from 1 to 4") for size in (0, L + 1)]
)
def test_a_block_that_is_no_block(arguments, message):
    (size,) = arguments
    is_refused(
        message,
        lambda: layer_removal(draws.parameters(CONFIG), jnp.ones((N, D)), CONFIG, size=size),
    )


def test_tokens_to_spare_are_a_count():
    params, x = draws.parameters(CONFIG), jnp.ones((N, D))
    is_refused("spare=-1 is not a whole number", layer_removal, params, x, CONFIG, spare=-1)


def test_cosines_of_tokens_that_are_zero_or_do_not_exist():
    a = jnp.array([[[1.0, 0], [0, 0], [1, 1]], [[0, 2], [1, 1], [0, -3]]])
    b = jnp.array([[2.0, 0], [1, 0], [0, 1]])
    expected = [[1, 0, 0.5**0.5], [0, 0.5**0.5, -1]]
    for mask in (None, jnp.array([True, True, False])):
        wanted = np.array(expected)[:, : 3 if mask is None else 2].mean(-1)
        np.testing.assert_allclose(mean_cosine(a, b, mask), wanted, rtol=1e-6)


def test_settled_is_where_it_stays_enough():
    enough = [
        [False, True, False, True, True],
        [True] * 5,
        [False] * 5,
        [True, False, True, False, False],
    ]
    assert find_settling_index(enough).tolist() == [3, 0, 4, 4]


def test_attention_that_is_uniform_and_attention_that_is_not(network):
    params, x, trace = network
    w_q = np.zeros_like(params.layers.attention.w_q)
    uniform_params = draws.changed(params, attention={"w_q": w_q, "b_q": None})
    head_measures = heads_in_memory(uniform_params, x, CONFIG, mask=MASK)
    shares = [head_measures[name] for name in ("largest_weight", "largest_column", "first_column")]
    np.testing.assert_allclose(
        [np.exp(-head_measures["entropy"]), *shares], 1 / MASK.sum(), rtol=1e-5
    )
    streamed = run_pass(
        LayerMeasure(measure_heads), *prepare_inputs(params, x, CONFIG, mask=MASK), CONFIG
    )
    head_measures = heads_in_memory(params, x, CONFIG, mask=MASK)
    weights = np.asarray(trace.attention)[:, :, np.asarray(MASK)]
    first = weights[..., MASK.argmax()]  # of the tokens that exist
    np.testing.assert_allclose(head_measures["first_column"], first.mean(-1), rtol=1e-5)
    np.testing.assert_allclose(head_measures["largest_column"], weights.mean(-2).max(-1), rtol=1e-5)
    exists = weights[..., MASK]
    expected = {
        "entropy": -np.sum(exists * np.log(exists), axis=-1).mean(-1),
        "largest_weight": exists.max(-1).mean(-1),
        "largest_column": exists.mean(-2).max(-1),
        "first_column": exists[..., 0].mean(-1),
    }
    assert streamed.keys() == expected.keys()
    near(streamed, expected, rtol=1e-4)


@dataclasses.dataclass(frozen=True)
class Totals(States):
    """Sums of the tokens that exist."""

    def measure(self, x, mask=None):
        return (x * mask[:, None]).sum(axis=0)


def test_a_measure_of_states_is_of_the_input_and_of_every_layer_under_the_mask(network):
    params, x, trace = network
    totals = run_pass(Totals(), *prepare_inputs(params, x, CONFIG, mask=MASK), CONFIG)
    expected = np.asarray(trace.hidden)[:, MASK].sum(axis=1)
    np.testing.assert_allclose(totals, expected, rtol=1e-4, atol=1e-5)

    def list_states(layer, sublayers):
        states = [values.output_state for values in sublayers.values()]
        return layer.context.mask, jnp.stack(states), sublayers["mlp"].branch_output

    mask, states, branch = replay(list_states, params, trace, CONFIG)  # of the trace as it is
    np.testing.assert_array_equal(mask, np.tile(MASK, (L, 1, 1)))
    np.testing.assert_array_equal(states[:, 0], trace.layers.after_attention)
    np.testing.assert_allclose(states[:, 1], trace.hidden[1:], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(branch, trace.mlp_branch)
