"""Saved states: dtypes, the newest, other devices, and damaged files."""

import json
import random
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.network.layers import NormParams
from rank_collapse.runs import seeds, states
from tests.support.refusals import is_refused


def damage(content, chance):
    """Changes some of the bytes, cuts a piece out, or cuts off the end."""
    content, kind = bytearray(content), chance.random()
    if kind < 0.6:
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] ^= chance.randint(1, 255)
    elif kind < 0.8:
        start = chance.randrange(len(content))
        del content[start : start + chance.randint(1, 50)]
    else:
        del content[chance.randrange(len(content)) :]
    return bytes(content)


STATE = {"w": np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32), "n": np.int32(7)}


@pytest.mark.full
def test_a_damaged_checkpoint_is_refused_or_the_same(tmp_path):
    states.save_state(tmp_path, 3, STATE)
    path, chance = states.state_path(tmp_path, 3), random.Random(1)
    content, refused = path.read_bytes(), 0
    for _ in range(100):
        path.write_bytes(damage(content, chance))
        try:
            state = states.restore_state(tmp_path, 3, STATE)
        except ValueError as error:
            refused += 1
            assert str(error).startswith("checkpoint 3 ") and "\n" not in str(error)
        else:
            np.testing.assert_array_equal(state["w"], STATE["w"])
            assert state["n"] == 7
    assert refused > 90


@pytest.fixture
def path(tmp_path):
    """The path of a file of metrics."""
    return tmp_path / "m.jsonl"


def test_a_tree_comes_back_with_dtypes_and_only_the_newest_step_stays(tmp_path):
    tree = [NormParams(gain=jnp.ones(3, jnp.bfloat16)), (jnp.arange(2), {"x": np.float64(1.5)})]
    tree += [jnp.ones(2, jnp.float8_e5m2), jnp.float8_e4m3fn(0.5)]
    for step in (1, 5, 30):
        states.save_state(tmp_path, step, tree)
    assert states.list_steps(tmp_path) == [30]
    assert states.list_steps(tmp_path / "absent") == []
    back = states.restore_state(tmp_path, 30, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), tree, back)


def test_all_older_states_are_deleted(tmp_path):
    """As processes leave them that are killed before they delete one."""
    for step in (1, 2, 10):
        states.state_path(tmp_path, step).touch()
    states.save_state(tmp_path, 11, STATE)
    assert states.list_steps(tmp_path) == [11]


def test_an_older_state_that_another_process_deletes_is_no_error(tmp_path, monkeypatch):
    list_steps = states.list_steps
    monkeypatch.setattr(states, "list_steps", lambda folder: [1, *list_steps(folder)])
    states.save_state(tmp_path, 2, STATE)
    assert list_steps(tmp_path) == [2]


def test_steps_are_listed_as_numbers(tmp_path):
    for name in ("10.npz", "9.npz", "x.npz", "\u00b2.npz", "-1.npz", "11.tmp"):
        (tmp_path / name).touch()
    assert states.list_steps(tmp_path) == [9, 10]


def test_states_have_the_dtypes_of_what_they_are_restored_like():
    key = jax.random.key(3, impl="rbg")
    saved = states.flatten_state({"a": [np.arange(2)], "k": key})
    assert saved.keys() == {"a.0", "k"} and states.flatten_state(1.5) == {"state": 1.5}
    like = {"a": [jax.ShapeDtypeStruct((2,), jnp.bfloat16)], "k": key}
    back = states.unflatten_state(saved, like, "it")
    assert back["a"][0].dtype == jnp.bfloat16 and back["a"][0].tolist() == [0, 1]
    assert jax.random.key_impl(back["k"]) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jax.random.key_data(back["k"]), jax.random.key_data(key))
    other = states.unflatten_state({"a": np.arange(2)}, {"a": np.ones(2, np.float32)}, "it")
    assert other["a"].dtype == np.float32
    device = states.unflatten_state({"a": np.arange(2)}, {"a": jnp.ones(2, jnp.float16)}, "it")
    assert device["a"].dtype == jnp.float16 and isinstance(device["a"], jax.Array)
    message = r"^it has k of shape \(4,\), not None$"
    is_refused(message, states.unflatten_state, saved, {"a": like["a"]}, "it")


def test_a_checkpoint_that_is_no_archive_is_named(tmp_path):
    (tmp_path / "3.npz").write_bytes(b"PK, but no archive")
    message = r"^checkpoint 3 is damaged: .*3\.npz cannot be read"
    is_refused(message, states.restore_state, tmp_path, 3, {"a": np.ones(1)})


def test_json_has_names_lists_and_plain_numbers():
    tree = {1: (np.float32(0.5), jnp.arange(2)), "path": Path("a/b"), "x": [None, True, "c"]}
    expected = {"1": [0.5, [0, 1]], "path": "a/b", "x": [None, True, "c"]}
    assert states.as_json(tree) == expected
    assert json.loads(json.dumps(states.as_json(tree))) == expected


def test_a_state_saved_on_two_devices_is_restored_on_one(tmp_path):
    two = seeds.seed_mesh()
    one = seeds.seed_mesh(jax.devices()[:1])
    state = seeds.shard_seeds({"w": jnp.arange(8.0).reshape(4, 2)}, two)
    states.save_state(tmp_path, 1, state)
    like = seeds.shard_seeds({"w": jnp.zeros((4, 2))}, one)
    back = states.restore_state(tmp_path, 1, like)
    assert back["w"].sharding == like["w"].sharding != state["w"].sharding
    np.testing.assert_array_equal(back["w"], state["w"])
    is_refused(
        r"has b of shape None, not \(3,\)",
        states.restore_state,
        tmp_path,
        1,
        like | {"b": jnp.ones(3)},
    )
