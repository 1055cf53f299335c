"""What is copied by NumPy is what a program of JAX gives: bits, type, shape and place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import compiling

if not compiling._KNOWN:
    pytest.skip("JAX copies with this release", allow_module_level=True)

from tests.support.copying import COPIES, copy_by_numpy

X = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
CALLS = {
    "stage": lambda x: lax.stage(X),
    "iota": lambda x: lax.iota(np.dtype(np.int32), 7),
    "broadcasted_iota": lambda x: lax.broadcasted_iota(np.dtype(np.float32), (2, 3, 4), 1),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 4, 3, 5), (1, 3)),
    "ones": lambda x: jnp.ones((2, 3)),
    "reshape": lambda x: lax.reshape(x, (2, 10)),
    "reshape of other axes": lambda x: lax.reshape(x, (2, 10), (1, 0)),
    "squeeze": lambda x: lax.squeeze(x[None, :, None], (0, 2)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "rev": lambda x: lax.rev(x, (1,)),
    "concatenate": lambda x: lax.concatenate([x, 2 * x], 1),
    "slice": lambda x: lax.slice(x, (1, 0), (4, 5), (2, 3)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, np.int32([1, 2]), (2, 2)),
    "dynamic_slice over both ends": lambda x: lax.dynamic_slice(x, np.int32([3, -9]), (2, 2)),
    "row": lambda x: x[-1],
    "to integers": lambda x: x.astype(int),
    "from integers": lambda x: jnp.arange(3).astype(jnp.float32),
    "to less precision": lambda x: x.astype(jnp.bfloat16),
    "rows of bfloat16": lambda x: x.astype(jnp.bfloat16)[1:3],
    "weak": lambda x: jnp.full((2, 2), 3.5),
    "row of keys": lambda x: jax.random.key_data(jax.random.split(jax.random.key(0))[1]),
    "no rows": lambda x: x[:0].reshape(0, 5),
}


@pytest.fixture(autouse=True)
def copies_by_numpy():
    """Copies by NumPy also where the suite runs as users do."""
    copy_by_numpy(True)
    yield
    compiling.copy_by_numpy(jax.config.read("jax_disable_most_optimizations"))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("place", [None, 0, 1])
@pytest.mark.parametrize("x64", [False, True])
def test_a_copy_is_the_result_of_the_program(name, place, x64):
    with jax.enable_x64(x64):
        x = jax.device_put(X, None if place is None else jax.devices()[place])
        copied = CALLS[name](x)
        copy_by_numpy(False)
        expected = CALLS[name](x)
        np.testing.assert_array_equal(copied, expected)
        assert copied.aval == expected.aval and copied.sharding == expected.sharding
        assert copied.committed == expected.committed


def test_copies_compile_nothing_and_are_independent_of_what_they_copy():
    programs = []
    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, *_, **__: programs.append("backend_compile" in name)
    )
    x = jax.device_put(np.ones((7, 3), np.float32))
    row, view = x[2], x.reshape(21)
    jax.monitoring.unregister_event_duration_listener(listener)
    assert not any(programs)
    x.delete()
    assert row.sum() == 3 and view.sum() == 21
    with pytest.raises(RuntimeError, match="deleted"):
        x[2]


@pytest.mark.parametrize("on", [True, False])
def test_what_jax_refuses_is_refused(on):
    copy_by_numpy(on)
    x, whole = jax.device_put(X), jax.device_put(np.ones((4, 5), np.int32))
    for call, message in (
        (lambda: lax.concatenate([x, whole], 0), "dtypes"),
        (lambda: lax.slice(x, (0, 0), (9, 9)), "limit_indices|slice_sizes"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_float64_keeps_its_precision_where_float32_is_usual():
    with jax.enable_x64(True):
        x = jnp.asarray(np.array([1 / 3, 2 / 3]))
    assert x[1].dtype == x[None].dtype == jnp.float64 and float(x[1]) == 2 / 3


def test_every_primitive_is_covered_by_a_call(monkeypatch):
    copied = set()
    for primitive in COPIES:
        usual = primitive.impl
        monkeypatch.setattr(
            primitive,
            "impl",
            lambda *a, usual=usual, name=primitive.name, **p: copied.add(name) or usual(*a, **p),
        )
    for call in CALLS.values():
        call(jax.device_put(X))
    assert copied == {primitive.name for primitive in COPIES}
