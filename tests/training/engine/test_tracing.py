"""Traced functions: keys that are used twice, data in programs, functions without a signature."""

import jax
import jax.numpy as jnp
import numpy as np

from rank_collapse.training.engine import tracing
from rank_collapse.training.engine.tracing import Traced, as_arrays, check_callable
from tests.oracles.small_sweeps import run
from tests.support.refusals import is_refused


def test_a_key_that_is_used_twice_is_said(capsys):
    def keep(key, hyper):
        return {"w": jax.random.normal(key, (3,)), "key": key}

    def draw(state, hyper, index):
        return state | {"w": jax.random.normal(state["key"], (3,))}, {"loss": 0.0}

    def fold(state, hyper, index):
        key = jax.random.fold_in(state["key"], index)
        return state | {"w": jax.random.normal(key, (3,))}, {"loss": 0.0}

    def keep_another(key, hyper):  # which the second step uses again
        key, other = jax.random.split(key)
        return {
            "w": jax.random.normal(key, (3,)),
            "key": other,
        }

    for begin, function, is_said in (
        (keep, draw, True),
        (keep_another, draw, True),
        (keep, fold, False),
    ):
        run(init=begin, step=function, quiet=False)
        assert ("a random key that was used is used again" in capsys.readouterr().err) is is_said


def test_the_hash_of_data_is_of_every_array_that_a_program_holds():
    """Also inside of loops, of keys, and of other dtypes or shapes of the same bytes."""

    def trace(array):
        def loop(x):
            return jax.lax.fori_loop(0, 2, lambda i, x: x + jnp.sum(jnp.sin(array)), x)

        return Traced("f", loop, (1.0,), {})

    arrays = [
        np.float32([1, 2, 3, 4]),
        np.float32([1, 2, 3, 5]),
        np.float32([[1, 2], [3, 4]]),
        np.float32([1, 2, 3, 4]).view(np.int32),
    ]
    traced = [trace(a) for a in arrays]
    assert len({t.data for t in traced}) == len(arrays)
    again = trace(np.float32([1, 2, 3, 4]))
    assert (again.data, again.fingerprint) == (traced[0].data, traced[0].fingerprint)
    assert traced[1].fingerprint == traced[0].fingerprint

    def draw(seed):
        key = jax.random.key(seed)
        return Traced("f", lambda x: x + jax.random.normal(key), (1.0,), {})

    data = [draw(seed).data for seed in (0, 1, 0)]
    assert data[0] == data[2] != data[1]


def test_an_argument_is_used_if_a_result_depends_on_it():
    traced = Traced("f", lambda a, b, c: (a + 0 * c, a), (1.0, 1.0, 1.0), {})
    assert traced.list_used() == [True, False, True]


def test_leaves_are_arrays_of_numbers_that_jax_can_hold():
    """What is refused is named with its place; Python's numbers and NumPy's become arrays."""
    tree = {"a": 1, "b": [True, 2.5, 1j], "c": np.int8(3), "d": np.ones(2, np.float32)}
    arrays = jax.tree.leaves(as_arrays("the state", tree))
    assert [a.dtype for a in arrays] == ["int32", "bool", "float32", "complex64", "int8", "float32"]
    assert all(isinstance(a, jax.Array) for a in arrays)
    for leaf, kind in (
        ("text", "str"),
        (np.array(["text"]), "ndarray"),
        (np.array([None]), "ndarray"),
        (np.array([b"text"]), "ndarray"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.array([1, 2], "m8[s]"), "ndarray"),
        (len, "builtin_function_or_method"),
    ):
        message = rf"the state holds {kind} at \['x'\], which is not an array; advice"
        is_refused(message, as_arrays, "the state", {"x": leaf}, "; advice", error=tracing.Refused)
    for number in (
        2**31,
        -(2**31) - 1,
        np.uint32(2**32 - 1).astype(np.int64),
        np.array([0, 2**40]),
    ):
        message = r"the state has a whole number at \['x'\] that does not fit into 32 bits"
        is_refused(message, as_arrays, "the state", {"x": number}, error=tracing.Refused)
    assert as_arrays("the state", 2**31 - 1) == 2**31 - 1
    key = {"x": jax.random.key(0)}
    assert as_arrays("the state", key)["x"] is key["x"]
    message = r"the state has random keys at \['x'\]: return numbers"
    is_refused(message, as_arrays, "the state", key, keys=False, error=tracing.Refused)


def test_functions_without_a_signature_are_not_checked():
    check_callable("step", max, "step(state, hyper, index)", {"a": 1})  # of C


def test_a_program_that_jax_cannot_check_for_reused_keys_is_taken_as_it_is(monkeypatch):
    def fail(*_):
        raise NotImplementedError

    init, step = Traced("init", lambda key: key, (jax.random.key(0),), {}), None
    monkeypatch.setattr(jax, "make_jaxpr", fail)
    assert tracing.reuses_key(init, step, jax.random.key(0), []) is False
