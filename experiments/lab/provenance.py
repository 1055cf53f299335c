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
    """Versions, machine, devices and git revision, for config.json."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "processor": processor(),
        "num_devices": len(devices),
        "git": git_revision(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def processor() -> str:
    """The processor's name and number of cores, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def git_revision() -> str | None:
    """Commit of the checkout this package runs from, "+changes" if modified; None without one."""
    folder = Path(__file__).resolve().parent

    def git(*arguments):
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "HEAD").strip() + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
