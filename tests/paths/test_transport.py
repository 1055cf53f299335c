"""The Jacobian from a state to the last one: against jacfwd, in three kinds of functions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rank_collapse as rc
from rank_collapse.paths import name_states, transport, transport_ranks
from tests.oracles import draws
from tests.support.closeness import assert_close
from tests.support.marks import full_but
from tests.support.refusals import is_refused, parametrize_refusals

DEPTH, N, D = 3, 6, 8
CONFIG = rc.transformer(
    depth=DEPTH, num_heads=2, d_model=D, mlp="gelu", norm_placement="pre", mask="causal"
)


def draw_params():
    return draws.parameters(CONFIG, weight_scale=2.0)


def in_one_program(measure, fn, *arrays, **options):
    """Computes measure(fn, *arrays, **options) in one program, where each of its steps is one."""
    return jax.device_get(jax.jit(lambda *arrays: measure(fn, *arrays, **options))(*arrays))


@jax.jit
def compute_jacobian(params, x, layer):
    """Computes ∂X^L[t, i] / ∂X^l[s, j] after a layer l."""
    return jax.jacfwd(lambda delta: last_state(params, x, layer, delta))(jnp.zeros((N, D)))


def last_state(params, x, layer, delta):
    """The last state, with delta added to the state after a layer."""

    def add(state, l):
        return state + jnp.where(l == layer, 1.0, 0.0) * delta

    return rc.apply(params, x, CONFIG, edit={"residual": add}).hidden[-1]


def by_hand(params):
    """The same network, layer by layer in Python, with names: no scan."""

    def fn(x):
        layers = [jax.tree.map(lambda a, l=l: a[l : l + 1], params.layers) for l in range(DEPTH)]
        for layer in layers:
            one = params.replace(layers=layer)
            named = name_states(one, CONFIG.replace(depth=1))
            x = named(x)
        return x

    return fn


@pytest.fixture
def inputs(x64):
    return draw_params(), draws.normal(N, D)


@pytest.mark.full
@pytest.mark.parametrize("layer", full_but([0, 1, 2], 1))
def test_transport_is_the_jacobian_in_a_scan_and_in_a_loop(inputs, layer):
    params, x = inputs
    v = np.random.default_rng(2).normal(size=D)
    want = np.einsum("tisj,j->tsi", compute_jacobian(params, x, layer), v)
    options = {"layer": layer, "branches": "attention"}
    for fn in (name_states(params, CONFIG), by_hand(params)):
        moved = in_one_program(transport, fn, x, v, first_position=2, **options)
        assert_close(moved.total, want[2:, 2:].sum(0).mean(0), rtol=1e-9, atol=1e-10)
        assert_close(moved.by_length.sum(0), moved.total, atol=1e-10)
        # no path passes more attentions than there are layers left
        assert np.all(np.abs(moved.by_length[DEPTH - layer :]) < 1e-12)
        one = in_one_program(transport, fn, x, v, first_position=0, sources=3, **options)
        assert_close(one.by_position.sum(0), want[:, 3], rtol=1e-9, atol=1e-10)


@pytest.mark.full
def test_frozen_transport_starts_at_the_state_as_path_contributions_do(inputs):
    """With the state itself as the direction, frozen parts are the network's own path sums."""
    params, x = inputs
    hidden = np.asarray(rc.apply(params, x, CONFIG).hidden)
    fn = name_states(params, CONFIG)
    options = {"layer": 0, "branches": "attention", "first_position": 0, "freeze": True}
    moved = in_one_program(transport, fn, x, hidden[1], **options)
    later = jax.tree.map(lambda a: a[1:], params.layers)
    want = rc.path_contributions(
        params.replace(layers=later), hidden[1], CONFIG.replace(depth=DEPTH - 1)
    )
    assert_close(moved.by_position[:DEPTH], want.by_length, atol=1e-10)
    assert_close(moved.by_length, moved.by_position.sum(axis=1), atol=1e-10)  # one source


@pytest.mark.full
def test_the_rank_of_the_jacobian_by_distance(inputs):
    params, x = inputs
    fn = name_states(params, CONFIG)
    jacobian = np.asarray(compute_jacobian(params, x, 1))
    want = [rc.effective_rank(jacobian[2 + m, :, 2]) for m in (0, 1, 3)]
    options = {"layer": 1, "source": 2, "branches": "attention", "distances": (0, 1, 3)}
    ranks = in_one_program(transport_ranks, fn, x, **options)
    assert_close(ranks[-1], want, rtol=1e-8)
    # the last row is of all lengths, however few of them are kept apart
    short = in_one_program(transport_ranks, fn, x, longest=0, **options)
    assert short.shape == (2, 3)
    assert_close(short[-1], want, rtol=1e-8)


@pytest.mark.parametrize("freeze", [False, True])
def test_the_ranks_at_all_distances_of_one_attention(x64, freeze):
    """Of x + P(x) x W, states in the scope of another name: frozen, all of P W stays."""
    x, w = draws.normal(N, D), draws.normal(D, D, seed=1)

    def attend(x, weights):
        scores = jnp.where(np.tri(N, dtype=bool), x @ x.T, -jnp.inf)
        return weights(jax.nn.softmax(scores)) @ x @ w

    def fn(x):
        x = checkpoint_name(2 * x, "stream")
        return x + checkpoint_name(attend(x, lambda p: p), "mix")

    fixed = jax.lax.stop_gradient if freeze else lambda p: p
    jacobian = np.asarray(jax.jacfwd(lambda x: attend(x, fixed))(2 * x))[2:, :, 2]
    whole = jacobian + np.eye(D) * (np.arange(N - 2) == 0)[:, None, None]
    options = {"layer": 0, "source": 2, "states": "stream", "branches": "mix", "freeze": freeze}
    ranks = in_one_program(transport_ranks, fn, x, **options)
    assert ranks.shape == (3, N - 2)
    assert_close(ranks[1], rc.effective_rank(jacobian), rtol=1e-8)
    assert_close(ranks[2], rc.effective_rank(whole), rtol=1e-8)


@pytest.mark.full
def test_longest_leaves_the_total_whole(inputs):
    params, x = inputs
    fn, v = name_states(params, CONFIG), np.arange(D)  # ones would not pass a LayerNorm
    options = {"layer": 0, "branches": "attention", "sources": [0, 3], "first_position": 2}
    whole = transport(fn, x, v, **options)
    assert_close(whole.by_length, whole.by_position[:, 2:].sum(axis=1) / 2, atol=1e-12)
    assert np.abs(whole.by_position[:, :2]).max() > 1e-3
    # two positions after a source are left out
    cut = in_one_program(transport, fn, x, v, longest=1, **options)
    assert cut.by_length.shape == (2, D) and np.abs(cut.longer[2:].sum(0)).max() > 1e-3
    assert_close(cut.total, whole.total, atol=1e-10)
    assert_close(cut.arriving, whole.by_position.sum(0), atol=1e-10)
    assert_close(whole.arriving, whole.by_position.sum(0), atol=1e-10)


def call(**changes):
    options = {
        "direction": np.ones(D),
        "layer": 0,
        "branches": "attention",
        "first_position": 0,
    } | changes
    fn = name_states(draws.parameters(CONFIG), CONFIG)
    return transport(fn, np.ones((N, D), np.float32), **options)


@parametrize_refusals(
    [
        (
            {"layer": 3},
            "layer=3 must be from 0 to 2: the number of states in fn that match states='residual' "
            "is 3",
        ),
        ({"states": "stream"}, "states='stream' matches no name in fn; name the state"),
        ({"layer": -1}, "layer=-1"),
        (
            {"direction": np.ones(3)},
            r"direction has the shape \[3\], but must have the shape \[8\] or \[6, 8\]",
        ),
        ({"first_position": 6}, "first_position=6 leaves out all 6 positions, but must be below 6"),
        ({"sources": 6}, r"sources=\[6\] must be positions from 0 to 5"),
        ({"branches": {"attention": "a"}}, "transport counts one kind"),
        ({"sources": [True, False]}, r"sources=\[True, False\] must be positions from 0 to 5"),
        ({"sources": [-1]}, r"sources=\[-1\] must be positions"),
        ({"sources": []}, r"sources=\[\] must be positions"),
        ({"direction": np.ones((5, D))}, r"direction has the shape \[5, 8\], but must have"),
        (
            {"branches": "attn"},
            "branches='attn' matches no scope or name; the nearest are 'attention'",
        ),
    ]
)
def test_a_wrong_use_is_refused(arguments, message):
    (changes,) = arguments
    is_refused(message, lambda: call(**changes))


def test_what_is_no_stack_of_states_and_distances_beyond_it_are_refused():
    x, options = np.ones((N, D), np.float32), {"layer": 0, "branches": "attention"}

    def fn(x):
        return x + checkpoint_name(2 * checkpoint_name(x, "residual"), "attention")

    message = r"fn has states of the shape \[1, 6, 8\], but transport needs \[n, d\]"
    is_refused(message, transport, fn, x[None], np.ones(D), first_position=0, **options)
    message = r"fn returns the shape \[8\], but must return states \[n, d\]"
    is_refused(
        message, transport, lambda x: fn(x).sum(0), x, np.ones(D), first_position=0, **options
    )
    for distances in ([0, 4], [-1]):
        message = rf"distances={re.escape(str(distances))} must be from 0 to 3, because source=2 is"
        is_refused(message, transport_ranks, fn, x, source=2, distances=distances, **options)
    for source in (-1, N):
        message = f"source={source} is not a whole number from 0 to {N - 1}"
        is_refused(message, transport_ranks, fn, x, source=source, **options)


def test_every_branch_of_a_network_has_the_name_of_its_kind():
    config = CONFIG.replace(cross_attention=True)
    states = jnp.ones((N, D))
    fn = name_states(draws.parameters(config), config, memory=2 * states)
    names = set(re.findall(r"name\[name=(\w+)\]", str(jax.make_jaxpr(fn)(states))))
    assert names == {"attention", "cross", "mlp", "residual"}


def test_a_name_in_a_condition_is_refused():
    def fn(x):
        return jax.lax.cond(
            x.sum() > 0, lambda x: checkpoint_name(x, "residual"), lambda x: 2 * x, x
        )

    with pytest.raises(ValueError, match="matches a name inside jax"):
        transport(fn, np.ones((4, 3)), np.ones(3), layer=0, branches="a", first_position=0)


@pytest.mark.parametrize("layer", [0, 1, 4, 5])
def test_states_around_a_scan_and_two_in_each_step_count_as_layers(x64, layer):
    """The states after layers that act on each token alone; a condition has no names."""
    weights, x, v = 0.3 * draws.normal(2, D, D), draws.normal(N, D), draws.normal(D, seed=3)

    def step(x, w):
        x = checkpoint_name(x + checkpoint_name(x @ w, "attention"), "residual")
        return checkpoint_name(2 * checkpoint_name(x, "residual_2"), "residual"), None

    def fn(x):
        x = jax.lax.scan(step, checkpoint_name(x, "residual"), weights)[0]
        x = jax.lax.cond(
            x[0, 0] < 99, lambda x: 3 * checkpoint_name(x, "residual_3"), lambda x: x, x
        )
        return 5 * checkpoint_name(x, "residual")

    moved = transport(fn, x, v, layer=layer, branches="attention", first_position=0, sources=1)
    one = np.eye(D)
    maps = [one + weights[0], 2 * one, one + weights[1], 2 * one, 3 * one, 5 * one]
    assert_close(moved.total, functools.reduce(np.matmul, maps[layer:], v), rtol=1e-9)
    # a position that is named twice counts twice in the mean
    options = {"layer": layer, "branches": "attention", "first_position": 0}
    repeated = transport(fn, x, v, sources=[1, 3, 1], **options)
    assert_close(repeated.total, moved.total, rtol=1e-9)
    assert_close(repeated.arriving[1], 2 * moved.total, rtol=1e-9)
    # whole numbers as a direction for each position
    places = np.arange(N * D).reshape(N, D) % 3
    arriving = transport(fn, x, places, **options).arriving
    assert_close(arriving, functools.reduce(np.matmul, maps[layer:], places), rtol=1e-9)
