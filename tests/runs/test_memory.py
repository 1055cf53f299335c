"""Groups of seeds that fit into memory: found by compiling, not guessed."""

from types import SimpleNamespace

import jax
import pytest

from rank_collapse.runs import memory
from rank_collapse.runs.seeds import seed_mesh


def make_program(size, per_seed=100, fixed=50):
    usage = SimpleNamespace(
        argument_size_in_bytes=per_seed * size,
        output_size_in_bytes=per_seed * size,
        temp_size_in_bytes=fixed,
        alias_size_in_bytes=per_seed * size,
    )
    return SimpleNamespace(memory_analysis=lambda: usage)


@pytest.mark.parametrize(("limit", "expected"), [(10_000, 64), (2000, 18), (100, 2), (3250, 32)])
def test_as_many_as_fit_are_compiled(monkeypatch, limit, expected):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: limit)
    sizes = []

    def compile_size(size):
        sizes.append(size)
        return make_program(size)

    program, size = memory.compile_largest(compile_size, 64, 2, seed_mesh())
    assert size == sizes[-1] == expected and len(sizes) <= 3
    assert memory.program_bytes(program) == 100 * size + 50


def test_a_program_that_the_compiler_finds_too_large_is_made_smaller(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 10**6)

    def compile_size(size):
        if size > 10:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return make_program(size)

    assert memory.compile_largest(compile_size, 64, 1, seed_mesh())[1] == 8
    with pytest.raises(jax.errors.JaxRuntimeError):
        memory.compile_largest(compile_size, 64, 32, seed_mesh())


def test_another_error_of_the_compiler_is_passed_on_at_once(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 10**6)
    sizes = []

    def compile_size(size):
        sizes.append(size)
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        memory.compile_largest(compile_size, 64, 1, seed_mesh())
    assert sizes == [64]


def test_what_is_free_is_the_devices_or_a_share_of_the_hosts():
    stats = {"bytes_limit": 1000, "bytes_in_use": 200}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[gpu, gpu]), size=2)
    assert memory.free_bytes(mesh) == 640
    one, two = (memory.free_bytes(seed_mesh(jax.devices()[:n])) for n in (1, 2))
    assert one // 2 == two > 10**7


def test_a_container_may_have_less_than_its_host(monkeypatch, tmp_path):
    mesh, limit = seed_mesh(jax.devices()[:1]), tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_LIMIT_FILE", limit)
    host = memory.free_bytes(mesh)
    for text, expected in (("1000001\n", 500_000), ("max\n", host), (f"{2**60}\n", host)):
        limit.write_text(text)
        assert memory.free_bytes(mesh) == expected


def test_what_xla_does_not_say_is_no_limit():
    assert memory.program_bytes(SimpleNamespace(memory_analysis=lambda: None)) == 0
    usage = memory.program_bytes(jax.jit(lambda x: 2 * x).lower(jax.numpy.ones(1000)).compile())
    assert 8000 <= usage < 20_000
