"""Seeds over devices, and checkpoints: no result depends on how many devices there are."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rank_collapse.runs import seeds
from tests.support.closeness import near
from tests.support.refusals import each_is_refused, is_refused
from tests.support.seed_chunks import map_seeds

needs_two = pytest.mark.skipif(len(jax.devices()) != 2, reason="JAX_NUM_CPU_DEVICES is not 2")


def single(key, shift):
    def body(x, _):
        return jnp.tanh(x @ x) + shift, x.sum()

    last, sums = jax.lax.scan(body, jax.random.normal(key, (3, 3)), length=4)
    return {"last": last, "sums": sums}


def test_more_seeds_do_not_change_earlier_ones():
    keys = jax.random.key_data(seeds.seed_keys(5, 4))
    np.testing.assert_array_equal(keys[:2], jax.random.key_data(seeds.seed_keys(5, 2)))
    np.testing.assert_array_equal(keys[2:], jax.random.key_data(seeds.seed_keys(5, 2, first=2)))
    expected = jax.random.key_data(jax.random.fold_in(jax.random.key(5), 3))
    np.testing.assert_array_equal(keys[3], expected)


def test_one_program_makes_the_keys_of_few_seeds(caplog):
    seeds.seed_keys(5, 1)
    with jax.log_compiles():
        keys = [jax.random.key_data(seeds.seed_keys(5, count)) for count in (seeds.KEYS, 3)]
        assert not [r for r in caplog.records if r.message.startswith("Compiling")]
        keys.append(jax.random.key_data(seeds.seed_keys(5, 5 * seeds.KEYS + 1)))
        assert [r for r in caplog.records if r.message.startswith("Compiling")]
    assert [len(k) for k in keys] == [seeds.KEYS, 3, 5 * seeds.KEYS + 1]
    last = jax.random.fold_in(jax.random.key(5), 5 * seeds.KEYS)
    np.testing.assert_array_equal(keys[2][-1], jax.random.key_data(last))
    np.testing.assert_array_equal(keys[2][: seeds.KEYS], keys[0])


@needs_two
@pytest.mark.parametrize(("chunk", "at_once"), [(0, None), (1, None), (2, 1), (4, 1), (0, 2)])
def test_devices_and_chunks_give_the_results_of_a_loop(chunk, at_once):
    keys = seeds.seed_keys(0, 5)  # not a multiple of two devices
    expected = [single(key, 0.25) for key in keys]
    for devices in (jax.devices()[:1], jax.devices()):
        mesh = seeds.seed_mesh(devices)
        out = map_seeds(single, keys, 0.25, mesh=mesh, chunk=chunk, at_once=at_once)
        assert out["sums"].shape == (5, 4)
        near(out, jax.tree.map(lambda *a: jnp.stack(a), *expected), rtol=1e-5, atol=1e-6)


def test_both_devices_work():
    mesh = seeds.seed_mesh()
    out = seeds.run_seeds(single, mesh)(seeds.seed_keys(0, 4), 0.0)
    assert {s.device for s in out["last"].addressable_shards} == set(jax.devices())


def test_a_swept_value_does_not_recompile():
    shifts = []  # one for each trace
    counted = lambda key, shift: shifts.append(shift) or single(key, shift)  # noqa: E731
    call, keys = seeds.run_seeds(counted, seeds.seed_mesh()), seeds.seed_keys(0, 2)
    call(keys, 0.0)
    num_traces = len(shifts)
    for shift in (0.5, 2.0):
        call(keys, shift)
    assert len(shifts) == num_traces > 0


@needs_two
def test_several_arguments_one_of_them_given_away():
    mesh = seeds.seed_mesh()
    call = seeds.run_seeds(lambda a, b, c: a + b * c, mesh, donate=(0,))
    first, second = seeds.shard_seeds((jnp.arange(3.0), jnp.ones(3)), mesh)
    out = call(first, second, 2.0)
    assert out.shape == (4,) and first.is_deleted() and not second.is_deleted()
    np.testing.assert_array_equal(seeds.to_host(out, 3), [2, 3, 4])


def test_keys_come_to_the_host_as_keys():
    keys = seeds.seed_keys(1, 3)
    back = seeds.to_host(seeds.shard_seeds(keys, seeds.seed_mesh()), 3)
    assert back.shape == (3,) and len(back.devices()) == 1
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))
    others = jax.random.split(jax.random.key(3, impl="rbg"), 3)  # of another generator
    for some in (seeds.to_host(others, 2), seeds.select_keys(others, np.array([0, 1]))):
        assert jax.random.key_impl(some) == jax.random.key_impl(others)
        data = jax.random.key_data(others)[:2]
        np.testing.assert_array_equal(jax.random.key_data(some), data)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5, None])
def test_groups_of_any_size_compute_each_seed_once(at_once):
    """Groups that the seeds fill, and a smaller last one."""
    mesh, values = seeds.seed_mesh(jax.devices()[:1]), jnp.arange(4.0)
    call = seeds.run_seeds(lambda a, b: (10 * a, a + b), mesh, at_once=at_once)
    tens, sums = call(values, 0.5)
    assert tens.tolist() == [0, 10, 20, 30] and sums.tolist() == [0.5, 1.5, 2.5, 3.5]


@needs_two
def test_padding_repeats_the_last_seed_and_is_cut_off_again():
    tree = {"a": jnp.arange(6).reshape(3, 2)}
    mesh = seeds.seed_mesh()
    padded = seeds.shard_seeds(tree, mesh, 6)
    np.testing.assert_array_equal(padded["a"][3:], 3 * [[4, 5]])
    np.testing.assert_array_equal(seeds.to_host(padded, 3)["a"], tree["a"])
    each_is_refused(
        (lambda: seeds.shard_seeds(tree, mesh, 2), "3 seeds do not fit into 2"),
        (lambda: seeds.run_seeds(single, mesh, at_once=0), "at_once=0"),
        (lambda: seeds.seed_keys(0, 0), "num_seeds=0"),
        (lambda: seeds.seed_keys(0, 1.5), "num_seeds=1.5"),
        (lambda: seeds.seed_keys(0, 2, 0.5), "first=0.5"),
    )
    assert [seeds.padded_size(count, mesh) for count in (1, 4, 5)] == [2, 4, 6]
    assert seeds.group_size(mesh) == 1
    assert seeds.to_host(padded)["a"].shape == (6, 2)
    assert seeds.shard_seeds({"a": jnp.arange(4)}, mesh)["a"].shape == (4,)
    is_refused("has no device", seeds.seed_mesh, [])


def test_programs_are_compiled_as_hard_as_their_level_says(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda fn, **options: options)
    monkeypatch.setattr(seeds, "seed_sharding", lambda mesh: "by seed")
    mesh, level = seeds.seed_mesh(), "xla_backend_optimization_level"
    monkeypatch.setattr(seeds.metadata, "version", lambda name: {"jaxlib": "0.10.9"}[name])
    for disabled, options, expected in (
        (True, {}, None),
        (False, {}, {level: 1}),
        (False, {"level": 2}, {level: 2}),
        (
            False,
            {"level": 0},
            {
                level: 0,
                "xla_llvm_disable_expensive_passes": True,
                "xla_cpu_use_fusion_emitters": False,
            },
        ),
    ):
        monkeypatch.setattr(type(jax.config), "read", lambda *_, disabled=disabled: disabled)
        made = seeds.run_seeds(single, mesh, donate=(1,), **options)
        assert made.pop("out_shardings") == "by seed"
        assert made == {"donate_argnums": (1,), "compiler_options": expected}
    monkeypatch.setattr(seeds.metadata, "version", lambda name: {"jaxlib": "0.11.0"}[name])
    assert seeds.run_seeds(single, mesh, level=0)["compiler_options"] == seeds.QUICK
    gpu = np.array([SimpleNamespace(platform="gpu")])
    made = seeds.run_seeds(single, SimpleNamespace(devices=gpu))
    assert made["compiler_options"] == {"xla_gpu_enable_triton_gemm": False}
    assert seeds.group_size(SimpleNamespace(devices=gpu)) is None
