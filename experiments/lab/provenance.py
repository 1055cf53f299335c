"""The origin of a result: versions, machine, devices, git revision.

A folder into which several commits, versions or machines have written lists all of them in its
config.json: the one that began it as "environment", others that measured as "later"
(`list_environments`), and those that only made tables, figures or the summary of the measurements
as "redrawn".
"""

import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "matplotlib")
LATER, REDRAWN = "later", "redrawn"  # lists of environments in config.json
_NO_ORIGIN = ("started", "num_devices")  # in which two environments of one origin may differ


Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]


def environment() -> JsonObject:
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


def read_environments(content: JsonObject, name: str) -> list[JsonObject]:
    """Reads a list of environments.

    Args:
        content: Content of a folder's config.json.
        name: `LATER` or `REDRAWN`.
    """
    return [environment for environment in content.get(name) or [] if _is_object(environment)]


def list_environments(content: JsonObject) -> list[JsonObject]:
    """Lists the environments of a folder's measurements, first the one that began it.

    Args:
        content: Content of the folder's config.json.
    """
    first = content.get("environment")
    return [first] * _is_object(first) + read_environments(content, LATER)


def _is_object(value):
    return isinstance(value, Mapping)


def list_commits(content: JsonObject) -> str:
    """Lists the commits that measured a folder's results: "3f2c… and 9eb0…"; "" for unknown.

    Args:
        content: Content of the folder's config.json.
    """
    commits = dict.fromkeys(str(e.get("git") or "unknown") for e in list_environments(content))
    return "" if [*commits] == ["unknown"] else " and ".join(commits)


def list_versions(content: JsonObject, package: str) -> str:
    """Lists the versions of a package that made a folder's results: "0.10.1 and 0.10.2".

    Args:
        content: Content of the folder's config.json.
        package: One of `PACKAGES`.
    """
    environments = list_environments(content)
    return " and ".join(dict.fromkeys(e["versions"][package] for e in environments))


def find_new(environments: Iterable[JsonObject], others: Iterable[JsonObject]) -> list[JsonObject]:
    """Finds the environments that differ from all others, apart from their time.

    Args:
        environments: Environments, one of which may be new.
        others: Environments that are already listed.
    """
    origins = [_select_origin(environment) for environment in others]
    new = []
    for environment in environments:
        if _select_origin(environment) not in origins:
            origins.append(_select_origin(environment))
            new.append(dict(environment))
    return new


def _select_origin(environment):
    return {name: value for name, value in environment.items() if name not in _NO_ORIGIN}
