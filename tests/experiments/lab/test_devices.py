"""Devices of a process: how many JAX starts with, where programs are stored, what is refused."""

from types import SimpleNamespace

import jax
import platformdirs
import pytest

from experiments.lab import devices


@pytest.fixture
def updates(monkeypatch):
    """Notes {option of JAX: its value} in place of setting it: JAX of this process has started."""
    noted = {}
    monkeypatch.setattr(jax.config, "update", noted.__setitem__)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(devices, "count_cores", lambda: 5)
    return noted


@pytest.mark.parametrize(("asked", "started"), [(3, 3), (1, 1), (9, 9), (0, 5)])
def test_jax_starts_with_the_devices_that_were_asked_for_or_one_for_each_core(
    asked, started, updates
):
    devices.start_devices(asked)
    assert updates["jax_num_cpu_devices"] == started


def test_a_number_of_devices_in_the_environment_counts(updates, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=4")
    devices.start_devices(3)
    assert "jax_num_cpu_devices" not in updates


def test_jax_that_has_started_keeps_its_devices(updates, monkeypatch):
    def refuse(name, value):
        raise RuntimeError("has started")

    monkeypatch.setattr(jax.config, "update", refuse)
    if jax.config.jax_compilation_cache_dir is not None:
        devices.start_devices(3)


@pytest.mark.parametrize("error", [RuntimeError("Unknown backend"), AssertionError()])
def test_a_platform_that_does_not_exist_is_named(error, updates, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr(jax, "devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "gpu9")
    with pytest.raises(ValueError, match=r"JAX_PLATFORMS='gpu9': (Unknown|it is not installed)"):
        devices.start_devices()


@pytest.mark.parametrize("folder", [None, "programs"])
def test_programs_are_stored_in_the_folder_of_the_user_unless_another_is_set(
    folder, updates, monkeypatch
):
    config = SimpleNamespace(jax_compilation_cache_dir=folder, update=updates.__setitem__)
    monkeypatch.setattr(devices.jax, "config", config)
    devices.start_devices()
    stored = updates.get("jax_compilation_cache_dir")
    assert stored == (None if folder else str(platformdirs.user_cache_path("rank_collapse")))


def test_cores_are_those_of_the_process_where_the_system_says(monkeypatch):
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 7)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda process: {0, 3}, raising=False)
    assert devices.count_cores() == 2
    monkeypatch.delattr(devices.os, "sched_getaffinity")  # as on macOS
    assert devices.count_cores() == 7


@pytest.mark.parametrize(
    ("plugins", "has_libtpu", "platforms", "expected"),
    [
        (["cuda"], False, None, True),
        ([], True, None, True),
        ([], False, None, False),
        (["cuda"], True, "cpu", False),
        (["cuda"], False, "cuda,cpu", True),
    ],
)
def test_an_accelerator_is_looked_for_where_a_plugin_is_installed(
    plugins, has_libtpu, platforms, expected, monkeypatch
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    modules = {"libtpu": "its place" if has_libtpu else None}
    with monkeypatch.context() as patch:
        patch.setattr(
            devices.importlib.metadata,
            "entry_points",
            lambda group: plugins if group == "jax_plugins" else [],
        )
        patch.setattr(devices.importlib.util, "find_spec", modules.__getitem__)
        has_accelerator = devices.has_accelerator()
    assert has_accelerator is expected
