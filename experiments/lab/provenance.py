"""The origin of a result: versions, machine, devices, git revision."""

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "matplotlib")


def environment() -> dict[str, Any]:
    """Describes versions, machine, devices and git revision, for config.json."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "processor": processor_name(),
        "num_devices": len(devices),
        "git": git_revision(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def processor_name() -> str:
    """Names the processor and its number of cores, as far as the system says."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def git_revision() -> str | None:
    """Returns the commit of this checkout, with "-dirty" if modified; None without one."""
    path = Path(__file__).resolve()
    tracked = ["ls-files", "--error-unmatch", path.name]
    described = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    try:
        for command in (tracked, described):
            git = ["git", "-C", str(path.parent), *command]
            run = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
