"""Checkpoints: structure, dtypes and shardings come back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.network.layers import NormParams
from rank_collapse.runs import seeds, states


def test_a_tree_comes_back_with_dtypes_and_only_the_newest_step_stays(tmp_path):
    tree = [NormParams(gain=jnp.ones(3, jnp.bfloat16)), (jnp.arange(2), {"x": np.float64(1.5)})]
    for step in (1, 5, 30):
        states.save(tmp_path, step, tree)
    assert states.steps(tmp_path) == [30]
    assert states.steps(tmp_path / "absent") == []
    back = states.restore(tmp_path, 30, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_state_saved_on_two_devices_is_restored_on_one(tmp_path):
    two = seeds.seed_mesh()
    one = seeds.seed_mesh(jax.devices()[:1])
    state = seeds.lay_out({"w": jnp.arange(8.0).reshape(4, 2)}, two)
    states.save(tmp_path, 1, state)
    like = seeds.lay_out({"w": jnp.zeros((4, 2))}, one)
    back = states.restore(tmp_path, 1, like)
    assert back["w"].sharding == like["w"].sharding != state["w"].sharding
    np.testing.assert_array_equal(back["w"], state["w"])


def test_a_missing_leaf_is_named(tmp_path):
    states.save(tmp_path, 1, {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"has b of shape None, not \(3,\)"):
        states.restore(tmp_path, 1, {"a": jnp.ones(2), "b": jnp.ones(3)})
