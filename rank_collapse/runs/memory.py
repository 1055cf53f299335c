"""How many seeds at a time fit into the memory of a device."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

# Of a device's free memory that a program may take. A CPU's is used by others too.
SHARES = {"cpu": 0.5}
OTHER_SHARE = 0.8
_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")  # of a container


def free_bytes(mesh: Mesh) -> int:
    """Return the bytes of each device that programs may take; of a CPU, of each share of it."""
    device = mesh.devices.flat[0]
    share = SHARES.get(device.platform, OTHER_SHARE)
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(share * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max", or another system
        total = min(total, int(_LIMIT_FILE.read_text()))
    return int(share * total) // mesh.size


def program_bytes(compiled: object) -> int:
    """Return the bytes of a compiled program on each device, as XLA says; 0 where it does not."""
    usage = compiled.memory_analysis()
    if usage is None:
        return 0
    arrays = usage.argument_size_in_bytes + usage.output_size_in_bytes
    return arrays + usage.temp_size_in_bytes - usage.alias_size_in_bytes


def compile_largest(
    compile_size: Callable[[int], Any], size: int, least: int, mesh: Mesh
) -> tuple[Any, int]:
    """Compile a program for as many seeds as fit into memory.

    XLA reports the memory that the program needs. If it is too much, the number of seeds is reduced
    in proportion, and the program is compiled again.

    Args:
        compile_size: Number of seeds → compiled program.
        size: The most that are wanted, a multiple of `least`.
        least: The fewest, a multiple of the devices.
        mesh: The devices.

    Returns:
        (program, its number of seeds).
    """
    limit = free_bytes(mesh)
    while True:
        try:
            compiled = compile_size(size)
            needed = program_bytes(compiled)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or size <= least:
                raise
            needed = 2 * limit
        if needed <= limit or size <= least:
            return compiled, size
        smaller = int(size * limit / needed) // least * least
        size = max(least, min(smaller, size - least))
