"""record_function on the inputs of another run: each branch takes in the stream of that run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rank_collapse as rc
from rank_collapse.agree.comparison import compare_files
from rank_collapse.agree.recording import open_recording
from tests.oracles import draws
from tests.oracles.plain_layers import (
    BOTH,
    FACTORS,
    MODELS,
    WEIGHTS,
    D,
    X,
    attend,
    compute_layer,
    norm,
    run_plain,
)
from tests.support.closeness import assert_close
from tests.support.refusals import is_refused

OTHER = X + 0.1 * draws.normal(*X.shape, seed=5)


def list_layers(path):
    return list(open_recording(path).read_layers())


@pytest.fixture
def replay(tmp_path):
    """Return a function that records a model on X, where it takes in its run on other tokens."""

    def record_both(model, other=None, keep=None, branches=BOTH, **how):
        rc.record_function(other or model, OTHER, tmp_path / "b.npz", branches=branches)
        with np.load(tmp_path / "b.npz") as arrays:
            np.savez(tmp_path / "b.npz", **{name: arrays[name] for name in keep or arrays})
        options = {"branches": branches, "inputs": tmp_path / "b.npz"} | how
        rc.record_function(model, X, tmp_path / "c.safetensors", **options)
        return tmp_path / "c.safetensors", tmp_path / "b.npz"

    return record_both


@pytest.mark.parametrize("name", MODELS)
def test_the_branches_on_the_inputs_of_another_run_are_those_of_that_run(replay, name):
    replayed, other = map(list_layers, replay(MODELS[name]))
    start = FACTORS["embedding"][2] * X if name == "embedding" else X
    np.testing.assert_array_equal(replayed[0].before[0], start)  # its own, before it is replaced
    for a, b in zip(replayed, other, strict=True):
        for kind in b.branches:
            np.testing.assert_array_equal(a.branches[kind], b.branches[kind])
        if a is not replayed[-1]:
            np.testing.assert_array_equal(a.after, b.after)


def test_a_stream_in_another_dtype_than_the_branches(replay):
    """The branch reads bfloat16, the sum is float32: both are the other run's."""

    def model(x):
        for w in WEIGHTS:
            narrow = x.astype(jnp.bfloat16)
            with jax.named_scope("att"):
                branch = attend(w.astype(jnp.bfloat16), norm(narrow))
            x = narrow.astype(jnp.float32) + branch.astype(jnp.float32)
            with jax.named_scope("mlp"):
                branch = jax.nn.gelu(x @ w[3]) @ w[4]
            x = x + branch
        return x

    replayed, other = map(list_layers, replay(model))
    for a, b in zip(replayed, other, strict=True):
        np.testing.assert_array_equal(
            a.branches["attention_branch"], b.branches["attention_branch"]
        )
        np.testing.assert_array_equal(a.branches["mlp_branch"], b.branches["mlp_branch"])


@pytest.mark.parametrize("form", ["skip_gain", "deepnorm", "parallel", "learned"])
def test_a_network_with_gains_of_skips_is_replayed(tmp_path, form):
    """The other run is a trace: its hidden states, not multiples of them."""
    fields = {
        "skip_gain": {"norm_placement": "pre", "skip_gain": 0.9},
        "deepnorm": {"norm_placement": "post", "skip_gain": 1.68},
        "parallel": {"norm_placement": "pre", "skip_gain": 0.9, "parallel": True},
        "learned": {"norm_placement": "pre", "learned_skip_gain": 0.7, "learned_per_feature": True},
    }[form]
    config = rc.transformer(depth=3, num_heads=2, d_model=D, **fields)
    params = draws.parameters(config, 4)
    fn, branches = rc.paths.name_states(params, config), {"attention": "attention", "mlp": "mlp"}
    rc.record(rc.apply(params, OTHER, config), tmp_path / "b.npz")
    path = tmp_path / "c.safetensors"
    rc.record_function(fn, X, path, branches=branches, inputs=tmp_path / "b.npz")
    replayed, other = list_layers(path), list_layers(tmp_path / "b.npz")
    for a, b in zip(replayed, other, strict=True):
        for kind in b.branches:
            assert_close(a.branches[kind], b.branches[kind], atol=3e-6)
        if a is not replayed[-1]:
            assert_close(a.after, b.after, atol=3e-6)


def faulty_model(x):
    for index, w in enumerate(WEIGHTS):
        with jax.named_scope("att"):
            attention = attend(w, norm(x)) * (0.99 if index == 1 else 1)
        x = x + attention
        with jax.named_scope("mlp"):
            mlp = jax.nn.gelu(norm(x) @ w[3]) @ w[4]
        x = x + mlp
    return x


def test_a_fault_is_found_on_the_inputs_of_the_other_run(replay):
    answer = compare_files(*replay(run_plain, faulty_model))
    assert answer.first is None and "embeddings differ" in answer.sentence  # X and OTHER do
    rows = {(row.layer, row.part): row for row in answer.rows}
    assert_close(rows[1, "attention"].scale, -0.01, atol=1e-4)
    assert all(row.added < 1e-5 for place, row in rows.items() if place != (1, "attention"))


def test_a_sum_that_is_computed_twice_is_one_sum(replay):
    def model(x):
        for w in WEIGHTS:
            with jax.named_scope("att"):
                attention = attend(w, norm(x))
            h = norm(x + attention)
            with jax.named_scope("mlp"):
                mlp = jax.nn.gelu(h @ w[3]) @ w[4]
            x = (x + attention) + mlp
        return norm(x)

    replayed, other = map(list_layers, replay(model))
    assert len(replayed) == len(other) == len(WEIGHTS)
    for a, b in zip(replayed, other, strict=True):
        for kind in b.branches:
            np.testing.assert_array_equal(a.branches[kind], b.branches[kind])


def test_the_mask_of_the_other_run_is_its_own(replay, tmp_path):
    mask = np.arange(len(X)) < 3
    path, inputs = replay(run_plain, mask=None)
    assert open_recording(path).shape == open_recording(inputs).shape
    options = {"branches": BOTH, "inputs": inputs}
    rc.record_function(run_plain, OTHER, inputs, branches=BOTH, mask=mask)
    rc.record_function(run_plain, X, path, mask=mask.astype(int).tolist(), **options)
    is_refused(
        "has another mask than the model",
        rc.record_function,
        run_plain,
        X,
        path,
        mask=~mask,
        **options,
    )


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (lambda x: x, "fn adds other branches than before"),
        (run_plain, "the branch 'att' reads another state"),
    ],
)
def test_a_choice_by_the_states_is_refused_where_it_changes(replay, instead, message):
    """Fewer branches than on the function's own stream, or more."""
    own_sum, other_sum = (compute_layer(WEIGHTS[0], x)[0].sum() for x in (X, OTHER))

    def model(x):
        x, _, _ = compute_layer(WEIGHTS[0], x)
        is_own = jnp.abs(x.sum() - own_sum) < jnp.abs(x.sum() - other_sum)
        x = jax.lax.cond(is_own, lambda x: compute_layer(WEIGHTS[1], x)[0], instead, x)
        return norm(compute_layer(WEIGHTS[2], x)[0])

    is_refused(message, replay, model, run_plain)


def test_of_states_alone_the_branches_are_its_own(replay):
    replayed, other = map(list_layers, replay(run_plain, keep=("residual",)))
    for index, (a, b) in enumerate(zip(replayed, other, strict=True)):
        _, attention, mlp = compute_layer(WEIGHTS[index], jnp.asarray(b.before[0], jnp.float32))
        assert_close(a.branches["attention_branch"][0], attention, atol=1e-5)
        assert_close(a.branches["mlp_branch"][0], mlp, atol=1e-5)


@pytest.mark.parametrize("keep", [None, ("residual", "attention_branch")])
def test_of_a_sum_of_both_branches_all_or_none_are_of_the_other_run(replay, keep):
    """The MLP stands first in the sum. With noise, too, the last state is a sum and not normed."""

    def model(x):
        for w in WEIGHTS:
            with jax.named_scope("att"):
                attention = attend(w, norm(x))
            with jax.named_scope("mlp"):
                mlp = jax.nn.gelu(norm(x) @ w[3]) @ w[4]
            x = x + (mlp + attention)
        return norm(x)

    replayed, other = map(list_layers, replay(model, keep=keep, noise=1e-6))
    state = np.asarray(other[-1].before[0], np.float32)
    parts = compute_layer(WEIGHTS[-1], jnp.asarray(state), "parallel")[1:]
    for kind, part in zip(("attention_branch", "mlp_branch"), parts, strict=True):
        assert_close(replayed[-1].branches[kind][0], 2 * part, atol=5e-5)
    assert_close(replayed[-1].after[0], state + 2 * sum(parts), atol=5e-5)


def test_noise_is_of_its_size(replay):
    """A branch that is its input shows the noise."""

    def model(x):
        with jax.named_scope("att"):
            branch = x * 1.0
        return x + branch

    rows = []
    for noise, seed in ((0.0, 3), (1e-3, 3), (1e-3, 4)):
        path, _ = replay(lambda x: model(model(x)), branches="att", noise=noise, seed=seed)
        recording = open_recording(path)
        assert float(recording.metadata["noise"]) == noise
        rows.append([layer.branches["attention_branch"] for layer in recording.read_layers()])
    for still, *noisy in zip(*rows, strict=True):
        for change in [(a - still) / still for a in noisy]:
            assert 0.7e-3 < change.std() < 1.4e-3 and abs(change.mean()) < 4e-4
        assert np.all(noisy[0] != noisy[1])


def shift_skips(x, first=0):
    """Branches read x and are added to x + 1, from a layer on."""
    for index, w in enumerate(WEIGHTS):
        with jax.named_scope("att"):
            attention = attend(w, norm(x))
        x = (x + 1 if index >= first else x) + attention
        with jax.named_scope("mlp"):
            mlp = jax.nn.gelu(norm(x) @ w[3]) @ w[4]
        x = x + mlp
    return x


@pytest.mark.full
def test_what_cannot_take_in_other_inputs_is_one_line(replay, tmp_path):
    path, inputs = replay(run_plain)

    def record(model=run_plain, x=X, out=path, inputs=inputs):
        rc.record_function(model, x, out, branches=BOTH, inputs=inputs)

    is_refused("has to be a .safetensors file", record, out=tmp_path / "c.npz")
    is_refused("has 5 tokens, and the model computed 3", record, x=X[:3])
    more = jnp.concatenate([X, X])
    is_refused("5 tokens of width 8, and the model has 1 example of 10", record, x=more)
    is_refused("has 3 layers, and the model has more", record, lambda x: run_plain(run_plain(x)))
    is_refused(
        "has 3 layers, and the model has 1", record, lambda x: compute_layer(WEIGHTS[0], x)[0]
    )
    is_refused("was recorded on another run's inputs", record, inputs=path)
    is_refused("reads another state", record, shift_skips)
    is_refused("reads another state besides", record, lambda x: shift_skips(x, 1))
