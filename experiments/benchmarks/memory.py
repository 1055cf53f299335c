"""Memory of processes and of compiled programs."""

import contextlib
import re
import resource
import sys
from pathlib import Path
from typing import Any

GB = 1e9


def peak(devices: list[Any] | None = None) -> int:
    """Largest size so far, in bytes: of the arrays on accelerators, else of this process."""
    stats = [device.memory_stats() or {} for device in devices or []]
    if stats and all("peak_bytes_in_use" in s for s in stats):
        return sum(s["peak_bytes_in_use"] for s in stats)
    # Where there is one: getrusage's starts at the size of the process this one came from.
    size = _bytes_of("/proc/self/status", "VmHWM")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size or (largest if sys.platform == "darwin" else 1024 * largest)


def _bytes_of(path, name):
    """Bytes of a line "name:  42 kB"; 0 where there is none."""
    found = ""
    with contextlib.suppress(OSError):
        found = Path(path).read_text("ascii", "replace")
    return 1024 * int((re.findall(rf"^{name}:\s*([0-9]+) kB", found, re.MULTILINE) or [0])[0])


def program_bytes(compiled: Any) -> int:
    """What a compiled program takes on one device, as XLA says: arguments, results, the rest."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    parts = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return parts - found.alias_size_in_bytes


def out_of_memory(error: Exception) -> bool:
    """Of a `JaxRuntimeError`: whether its message is that of a device without memory left."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()
