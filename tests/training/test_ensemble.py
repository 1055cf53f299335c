"""Ensembles: seeds, devices and chunks that do not change results, divergence, resume."""

import contextlib
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.train import sorting
from rank_collapse.network.config import TransformerConfig
from rank_collapse.network.embedding import EmbeddingConfig
from rank_collapse.runs import states
from rank_collapse.runs.seeds import seed_keys, seed_mesh
from rank_collapse.training import ensemble as ensembles
from rank_collapse.training.ensemble import Ensemble, Trained, _as_runs
from rank_collapse.training.tasks.examples import Examples
from rank_collapse.training.training import (
    Hyper,
    Recipe,
    batch_forward,
    init_state,
    train_epoch,
)
from tests.support.closeness import assert_close, near
from tests.support.refusals import is_refused

CONFIG = TransformerConfig(
    depth=1,
    num_heads=2,
    d_model=8,
    attention_skip=True,
    norm_placement="post",
    init="reference",
    embedding=EmbeddingConfig(
        vocab_size=5, d_embed=8, positions="learned", num_positions=4, projection="before_norm"
    ),
)
RECIPE = Recipe(config=CONFIG, num_outputs=5, batch_size=4, num_epochs=4, shuffle=True)


def make_data(key):
    return {"train": sorting.make_examples(key, 10, 4, 5)}


def make_ensemble(devices=2, **options):
    options = {"epochs_per_chunk": 3} | options  # the last chunk is a short one
    return Ensemble(RECIPE, make_data, mesh=seed_mesh(jax.devices()[:devices]), **options)


@pytest.fixture(scope="module")
def two_devices():
    return make_ensemble()


@pytest.fixture(scope="module")
def reference_run(two_devices):
    return two_devices.train(seed_keys(2, 5), Hyper(learning_rate=0.01))


run_models = jax.jit(jax.vmap(lambda m, x: batch_forward(m, x, CONFIG), (0, None)))


def compute_outputs(state, seeds):
    """Computes logits of fixed sequences, seed by seed.

    Not the weights: the gradient of the key bias is zero but for rounding, which Adam blows up.
    """
    inputs = np.random.default_rng(9).integers(0, 5, (6, 4))
    inputs = Examples(inputs, inputs, np.ones((6, 4), bool))
    model = jax.tree.map(lambda a: np.asarray(a)[seeds], state.model)
    return np.asarray(run_models(model, inputs))


def assert_same(a, b, seeds=(0, 1, 2, 3, 4), other_seeds=None):
    ours = compute_outputs(a, list(seeds))
    assert_close(ours, compute_outputs(b, list(other_seeds or seeds)), atol=2e-4)
    assert ours.std() > 0.1  # not the logits of an untrained network


@pytest.mark.full
def test_seeds_differ_and_learn(reference_run):
    assert reference_run.losses.shape == (5, 4) and np.isfinite(reference_run.losses).all()
    assert len(np.unique(reference_run.losses[:, 0])) == 5
    assert (reference_run.losses[:, -1] < reference_run.losses[:, 0]).all()
    assert reference_run.diverged_at.tolist() == [-1] * 5 and reference_run.watched is None


@pytest.mark.full
def test_a_seed_is_one_network_trained_on_data_of_a_key_of_its_own(reference_run):
    hyper = Hyper(learning_rate=jnp.float32(0.01))
    key_data, key_state = jax.random.split(seed_keys(2, 5)[1])

    @jax.jit
    def train_one(key_data, key_state):
        state = init_state(key_state, hyper, RECIPE)
        return train_epoch(state, make_data(key_data)["train"], 0, hyper, RECIPE)[1]

    loss = train_one(key_data, key_state)
    np.testing.assert_allclose(loss, reference_run.losses[1, 0], rtol=1e-4)


@pytest.mark.full
def test_a_seed_alone_is_the_same_seed_among_others(two_devices, reference_run):
    single = two_devices.train(seed_keys(2, 1, first=3), Hyper(learning_rate=0.01))
    np.testing.assert_allclose(single.losses[0], reference_run.losses[3], rtol=1e-5)
    assert_same(single.state, reference_run.state, (0,), (3,))


def test_interrupted_and_resumed_is_uninterrupted(two_devices, reference_run, tmp_path):
    class Interrupted(Exception):
        pass

    def interrupt(epoch, snapshot, losses):
        states.save_state(tmp_path, epoch, snapshot())
        raise Interrupted

    keys, hyper = seed_keys(2, 5), Hyper(learning_rate=0.01)
    with pytest.raises(Interrupted):
        two_devices.train(keys, hyper, on_chunk=interrupt)
    assert states.list_steps(tmp_path) == [3]
    epochs = []
    resumed = two_devices.train(
        keys,
        hyper,
        resume=lambda like: (3, states.restore_state(tmp_path, 3, like)),
        on_chunk=lambda epoch, snapshot, losses: epochs.append(epoch),
    )
    assert epochs == [4]
    np.testing.assert_array_equal(resumed.losses, reference_run.losses)
    assert_same(resumed.state, reference_run.state)
    from_start = two_devices.train(keys, hyper, resume=lambda like: (0, like))
    np.testing.assert_array_equal(from_start.losses, reference_run.losses)
    # Five seeds are padded to six on two devices; one device and no padding go on from there.
    elsewhere = make_ensemble(devices=1, epochs_per_chunk=1).train(
        keys, hyper, resume=lambda like: (3, states.restore_state(tmp_path, 3, like))
    )
    np.testing.assert_allclose(elsewhere.losses, reference_run.losses, rtol=1e-4)
    np.testing.assert_array_equal(elsewhere.losses[:, :3], reference_run.losses[:, :3])
    assert_same(elsewhere.state, reference_run.state)


@pytest.mark.full
def test_a_sweep_compiles_once_and_a_diverged_run_is_kept_apart(
    two_devices, reference_run, monkeypatch
):
    traces = []
    monkeypatch.setattr("rank_collapse.training.ensemble.train_epoch", lambda *a: traces.append(1))
    rates = np.array([0.01, np.inf, 0.003, 0.0, 0.01], np.float32)
    dropout = np.array([0.1, 0.1, 0.1, 0.1, 0.3], np.float32)
    swept = two_devices.train(seed_keys(2, 5), Hyper(learning_rate=rates, dropout=dropout))
    assert not traces
    assert swept.diverged_at.tolist() == [-1, 0, -1, -1, -1]
    np.testing.assert_allclose(swept.losses[0], reference_run.losses[0], rtol=1e-5)
    assert not np.allclose(swept.losses[2], reference_run.losses[2], rtol=1e-4)
    assert not np.allclose(swept.losses[4], reference_run.losses[4], rtol=1e-4)
    program, runs = two_devices.begin(seed_keys(2, 5), _as_runs(Hyper(), 5))
    begun = program.unflatten(runs)[0]
    still = (jax.tree.map(lambda a: np.asarray(a)[3], m) for m in (swept.state.model, begun.model))
    near(*still)  # of learning rate 0


@pytest.mark.full
def test_floats_of_the_network_differ_between_runs_of_one_program(two_devices, reference_run):
    """Gains by layer and temperatures by run are those of a recipe that has them."""
    keys, rate = seed_keys(2, 1), 0.01
    floats = {"skip_gain": np.array([[1.0], [0.5]]), "temperature": np.array([1.0, 3.0])}
    swept = two_devices.train(
        jnp.concatenate([keys, keys]), Hyper(learning_rate=rate, network=floats)
    )
    np.testing.assert_allclose(swept.losses[0], reference_run.losses[0], rtol=1e-4)
    config = CONFIG.replace(skip_gain=0.5, temperature=3.0)
    recipe = dataclasses.replace(RECIPE, config=config)
    single = Ensemble(recipe, make_data, epochs_per_chunk=4).train(keys, Hyper(learning_rate=rate))
    np.testing.assert_allclose(swept.losses[1], single.losses[0], rtol=1e-4)
    assert abs(swept.losses[1] - swept.losses[0]).max() > 0.001


class Count(NamedTuple):
    model: jax.Array  # epochs done [s], in the place of a network


def make_counting_ensemble():
    """An ensemble whose model is the number of epochs that it was trained."""

    def watch(count, data, *_):
        return {"count": count + data["zero"], "pair": jnp.stack([count, -count])}

    ensemble = make_ensemble(devices=1, watch=watch)
    ensemble.init = lambda key, hyper: (Count(jnp.zeros(())), {"zero": jnp.zeros(())})
    ensemble.step = lambda state, hyper, epoch: (
        (Count(state[0].model + 1), state[1]),
        {"loss": jnp.float32(epoch)},
    )
    return ensemble


def test_the_last_chunk_is_watched_where_chunks_do_not_divide_the_epochs():
    """Snapshots keep what they hold, and training that is resumed looks on from there."""
    ensemble, keys, hyper = make_counting_ensemble(), seed_keys(0, 2), Hyper(learning_rate=0.01)
    snapshots, looks, chunks = [], [], []
    run = ensemble.train(
        keys,
        hyper,
        on_chunk=lambda epoch, snapshot, losses: (
            chunks.append(losses.shape) or snapshots.append((epoch, snapshot()))
        ),
        on_watched=lambda epoch, new, losses: looks.append(
            (epoch, new["count"][0], new["pair"][0].tolist(), losses.shape)
        ),
    )
    np.testing.assert_array_equal(run.watched["count"], [[0, 3, 4]] * 2)
    np.testing.assert_array_equal(run.watched["pair"], [[[0, 0], [3, -3], [4, -4]]] * 2)
    np.testing.assert_array_equal(run.losses, [[0, 1, 2, 3]] * 2)
    assert {a.dtype for a in (run.losses, *run.watched.values())} == {np.dtype(np.float32)}
    assert looks == [(at, at, [at, -at], (2, at)) for at in (0, 3, 4)]
    assert chunks == [(2, 3), (2, 4)]
    (epoch, first), (last, whole) = snapshots
    assert (epoch, last) == (3, 4) and np.isnan(first["losses"][:, 3]).all()
    np.testing.assert_array_equal(first["watched"]["count"], [[0, 3, 0]] * 2)
    looks.clear()
    resumed = ensemble.train(
        keys, hyper, resume=lambda _: (3, first), on_watched=lambda *look: looks.append(look[0])
    )
    assert looks == [4]
    again = ensemble.train(keys, hyper, resume=lambda _: (4, whole))
    begun = ensemble.train(keys, hyper, resume=lambda like: (0, like))
    for finished in (resumed, again, begun):
        for name, values in run.watched.items():
            np.testing.assert_array_equal(finished.watched[name], values)
        np.testing.assert_array_equal(finished.losses, run.losses)
        np.testing.assert_array_equal(finished.state.model, [4, 4])
    np.testing.assert_array_equal(first["watched"]["count"], [[0, 3, 0]] * 2)
    assert ensemble.train(seed_keys(0, 3), hyper).losses.shape == (3, 4)
    assert Ensemble(RECIPE, make_data).epochs_per_chunk == 5
    assert Ensemble(RECIPE, make_data, at_once=3).at_once == 3
    empty = make_counting_ensemble()
    empty.recipe = dataclasses.replace(RECIPE, num_epochs=0)
    nothing = empty.train(keys, hyper)
    assert nothing.losses.shape == (2, 0) and nothing.watched["count"].tolist() == [[0], [0]]


def test_a_program_is_of_the_number_of_runs_and_of_names_shapes_and_keys(monkeypatch):
    """Another name, shape, generator or number has a program of its own, other values have not."""
    made = []

    class Recorded:
        def __init__(self, functions, **options):
            made.append(options)

        def begin(self, *_):
            return None

    monkeypatch.setattr(ensembles, "Program", Recorded)
    ensemble = make_counting_ensemble()
    ensemble.mesh, ensemble.at_once = seed_mesh(), 7

    def begin(keys, **network):
        return ensemble.begin(keys, _as_runs(Hyper(network=network), len(keys)))[0]

    keys = seed_keys(0, 3)
    changed = (
        (keys, {"a": 1.0}),
        (keys, {"b": 1.0}),
        (keys, {"a": np.ones((3, 2))}),
        (jax.random.split(jax.random.key(0, impl="rbg"), 3), {"a": 1.0}),
        (seed_keys(0, 2), {"a": 1.0}),
    )
    programs = [begin(some_keys, **network) for some_keys, network in changed]
    assert len({*map(id, programs)}) == 5 == len(made)
    assert begin(keys, a=np.arange(3.0)) is programs[0]
    assert [options["size"] for options in made] == [4, 4, 4, 4, 2]
    expected = {"every": 3, "at_once": 7, "freezes": False, "mesh": ensemble.mesh}
    for options in made:
        assert {name: options[name] for name in expected} == expected


def test_a_function_of_models_is_of_each_seed_with_its_data_values_and_key():
    ensemble, keys = make_ensemble(devices=1), seed_keys(0, 3)
    rates = jnp.array([0.1, 0.2, 0.3])
    call = ensemble.map_models(
        lambda model, data, hyper, key: {
            "all": jnp.stack([model, data["a"], hyper.learning_rate]),
            "key": jax.random.key_data(key),
        }
    )
    laid_out = Count(jnp.array([1.0, 2, 3])), {"a": jnp.array([4.0, 5, 6])}, Hyper(rates)
    results = call(*ensemble.lay_out((*laid_out[:2], _as_runs(laid_out[2], 3), keys)), num_seeds=2)
    np.testing.assert_allclose(results["all"], [[1, 4, 0.1], [2, 5, 0.2]], rtol=1e-6)
    np.testing.assert_array_equal(results["key"], jax.random.key_data(keys)[:2])


def measure_models(count, devices=1, at_once=1, **options):
    """Measures so many made-up models, but the last, which pads the others."""
    ensemble = make_ensemble(devices, at_once=at_once)
    call = ensemble.map_models(
        lambda model, data, hyper, key: {"sum": model + data["a"] + hyper.learning_rate}
    )
    keys, values = seed_keys(0, count), jnp.arange(1.0, count + 1)
    hyper = _as_runs(Hyper(0.5 * values), count)
    laid_out = ensemble.lay_out((Count(values), {"a": 10 * values}, hyper, keys))
    return call(*laid_out, num_seeds=count - 1, **options)["sum"]


@pytest.mark.parametrize(
    ("count", "reached"),
    [(2, [1]), (3, [2]), (4, [2, 3]), (8, [2, 4, 6, 7]), (5, [4]), (7, [2, 4, 6])],
)
def test_seeds_that_are_measured_some_at_a_time_are_those_of_one_call(count, reached):
    """Two or more at a time, so that XLA compiles a loop, and few that are repeated."""
    done, activities = [], []

    @contextlib.contextmanager
    def note_activity(name):
        activities.append(name)
        yield

    expected = measure_models(count)
    np.testing.assert_allclose(expected, 11.5 * np.arange(1, count), rtol=1e-6)
    some = measure_models(count, on_seeds=done.append, activity=note_activity)
    np.testing.assert_array_equal(some, expected)
    assert done == reached and activities == ["compiling what is measured"]


@pytest.mark.parametrize(
    ("changes", "reached"), [({"devices": 2}, [4, 7]), ({"at_once": 4}, [7])], ids=str
)
def test_of_several_devices_each_has_two_seeds_at_a_time_and_vmapped_ones_are_one_call(
    changes, reached
):
    done = []
    some = measure_models(8, on_seeds=done.append, **changes)
    np.testing.assert_allclose(some, 11.5 * np.arange(1, 8), rtol=1e-6)
    assert done == reached


def test_compiling_is_an_activity_before_the_first_chunk(two_devices, reference_run):
    order = []

    @contextlib.contextmanager
    def note_activity(name):
        order.append(name)
        yield

    run = two_devices.train(
        seed_keys(2, 5),
        Hyper(learning_rate=0.01),
        activity=note_activity,
        on_chunk=lambda epoch, *_: order.append(epoch),
    )
    assert order == ["drawing data and weights", "compiling", 3, 4]
    np.testing.assert_array_equal(run.losses, reference_run.losses)


def test_a_run_diverges_in_its_first_epoch_without_a_finite_loss():
    losses = np.array([[1, 2, 3], [1, np.nan, 2], [np.inf, np.nan, 0], [3, 2, np.nan]])
    assert Trained(None, None, losses).diverged_at.tolist() == [-1, 1, 0, 2]
    assert Trained(None, None, losses[:, :0]).diverged_at.tolist() == [-1] * 4


def test_values_of_runs_are_float32_with_their_axis_first():
    """A number is that of every run; `network` and `start` may have further axes."""
    network, start = {"skip_gain": np.ones((3, 2)), "temperature": 2}, np.ones((3, 1, 4))
    hyper = Hyper(learning_rate=[0.1, 0.2, 0.3], dropout=None, network=network, start=start)
    hyper = hyper.replace(learning_rate=np.array(hyper.learning_rate))
    runs = _as_runs(hyper, 3)
    assert {a.dtype for a in jax.tree.leaves(runs)} == {np.dtype(np.float32)}
    assert (runs.network["skip_gain"].shape, runs.start.shape) == ((3, 2), (3, 1, 4))
    assert runs.network["temperature"].tolist() == [2, 2, 2] and runs.dropout is None
    np.testing.assert_allclose(runs.learning_rate, [0.1, 0.2, 0.3], rtol=1e-6)
    assert runs.warmup.tolist() == [0, 0, 0]


def test_values_for_another_number_of_runs_are_named(two_devices):
    is_refused("epochs_per_chunk=0", make_ensemble, epochs_per_chunk=0)
    is_refused(r"keys of shape \(\)", two_devices.train, jax.random.key(0), Hyper())
    is_refused("hyper is a dict", two_devices.train, seed_keys(0, 2), {"dropout": 0.1})
    is_refused("devices= has no", seed_mesh, [])
    is_refused(r"keys of shape \(0,\)", two_devices.train, seed_keys(0, 2)[:0], Hyper())
    no_examples = {"eval": make_data(jax.random.key(0))["train"]}
    for data in (no_examples, {"train": ()}, [make_data(jax.random.key(0))["train"]]):
        ensemble = Ensemble(RECIPE, lambda key, data=data: data)
        is_refused("named 'train'", ensemble.train, seed_keys(0, 2), Hyper())
    is_refused(
        r"hyper.network.skip_gain of shape \(2, 1\) .* 3 runs",
        two_devices.train,
        seed_keys(0, 3),
        Hyper(network={"skip_gain": np.ones((2, 1))}),
    )
    for values, message in (
        ({"learning_rate": np.full((2, 2), 0.01)}, r"hyper.learning_rate of shape \(2, 2\)"),
        ({"learning_rate": np.full(1, 0.01)}, r"hyper.learning_rate of shape \(1,\)"),
        ({"network": {"temperature": "2"}}, "network.temperature='2' is not in"),
    ):
        is_refused(message, two_devices.train, seed_keys(0, 2), Hyper(**values))


@pytest.mark.parametrize(
    "change",
    [
        lambda like: (9, like),
        lambda like: (-1, like),
        lambda like: (2, like | {"losses": like["losses"][:1]}),
        lambda like: (2, {"state": like["state"]}),
        lambda like: (2, like | {"state": jax.tree.map(lambda a: a[:1], like["state"])}),
    ],
)
def test_a_snapshot_of_other_runs_is_refused(two_devices, change):
    train = two_devices.train
    is_refused("resume returned", train, seed_keys(0, 2), Hyper(learning_rate=0.01), resume=change)


@pytest.mark.full
def test_devices_chunks_and_vectorisation_change_nothing(reference_run):
    ensemble = make_ensemble(devices=1, epochs_per_chunk=2, at_once=3)
    other = ensemble.train(seed_keys(2, 5), Hyper(learning_rate=0.01))
    np.testing.assert_allclose(other.losses, reference_run.losses, rtol=1e-4)
    assert_same(other.state, reference_run.state)
