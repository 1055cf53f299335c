"""Devices of a process: how many JAX starts with, where programs are stored, what is refused."""

import jax
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
