"""Claims: which of several processes, on any hosts, does a part of the work.

    claims = Claims(folder)
    claim = claims.take("depth=2")           # None: another process is at it
    if claim is not None:
        with claim:
            ...

A claim is a file that is made by exclusive creation, which network file systems do right where
they get `flock` wrong. Nothing is ever deleted or renamed: who takes over from a process that has
died makes the file of the next number, "depth=2.1" after "depth=2.0", and of several that try only
one succeeds. A process is taken for dead if it is of this host and no longer runs, or if its file
has not been touched for `patience` seconds, by the clock of the file system.
"""

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType

from rank_collapse.runs.files import make_folder, writing

PATIENCE = 60.0  # seconds without a sign of life
_RELEASED = 0  # time of the file of a claim that was given back


class Claim:
    """Held until it is closed or the process ends; a thread touches its file. A context manager."""

    def __init__(self, path: Path, every: float):
        self.path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(every,), daemon=True)
        self._thread.start()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the work back, done or not."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.utime(self.path, (_RELEASED, _RELEASED))

    def _beat(self, every):
        while not self._ended.wait(every):
            with contextlib.suppress(OSError):
                os.utime(self.path)


class Claims:
    """The claims on named parts of some work.

    Args:
        folder: Where they lie, on a file system that all processes see; made where it is missing.
        patience: Seconds without a sign of life after which a process of another host is dead.

    Raises:
        RunError: The folder cannot be made or written to.
    """

    def __init__(self, folder: str | os.PathLike, patience: float = PATIENCE):
        self.folder, self.patience = Path(folder), patience
        make_folder(self.folder)

    def take(self, name: str) -> Claim | None:
        """The claim on a part, or None where a process that lives has it.

        Raises:
            RunError: The folder cannot be written to.
        """
        latest = self._numbers().get(name, -1)
        if latest >= 0 and self._lives(self._path(name, latest)):
            return None
        path = self._path(name, latest + 1)
        with writing(path):
            try:
                file = open(path, "x")  # noqa: SIM115 (another may have been quicker)
            except FileExistsError:
                return None
            with file:
                json.dump(_me(), file)
        return Claim(path, self.patience / 6)

    def wait(self, name: str, every: float = 0.1) -> Claim:
        """`take`, once whoever has it is done or dead."""
        while (claim := self.take(name)) is None:
            time.sleep(every)
        return claim

    def holder(self, name: str) -> str | None:
        """Who has a part, as "pid 12 on host"; None where nobody has."""
        return self.holders().get(name)

    def holders(self) -> dict[str, str]:
        """{part: who has it} of all parts that somebody has."""
        found = {}
        for name, number in self._numbers().items():
            path = self._path(name, number)
            if self._lives(path):
                who = _read(path)
                found[name] = f"pid {who.get('pid', '?')} on {who.get('host', '?')}"
        return found

    def _path(self, name, number):
        return self.folder / f"{name}.{number}"

    def _numbers(self):
        """The number of the last file of each part."""
        found = {}
        for entry in os.scandir(self.folder):
            name, _, number = entry.name.rpartition(".")
            if number.isdecimal():
                found[name] = max(found.get(name, -1), int(number))
        return found

    def _lives(self, path):
        touched = path.stat().st_mtime
        if touched == _RELEASED:
            return False
        found, me = _read(path), _me()
        if found and all(found.get(key) == me[key] for key in ("host", "namespace")):
            return _start(found["pid"]) == found["start"]  # also of this process's own number
        return self._now() - touched < self.patience

    def _now(self):
        """The file system's clock, which may not be this machine's."""
        path = self.folder / f"now-{uuid.uuid4().hex}"
        with writing(path):
            path.touch()
            now = path.stat().st_mtime
            path.unlink()
        return now


def _read(path):
    """What a claim says; nothing where it is only just being written."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    whole = isinstance(found, dict) and found.keys() == _me().keys()
    return found if whole and isinstance(found["pid"], int) else {}


def _me():
    """This process among all there are: numbers of processes are used again, and by containers."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        namespace += Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    host, pid = platform.node(), os.getpid()
    return {"host": host, "namespace": namespace, "pid": pid, "start": _start(pid)}


def _start(pid):
    """When a process of this host began, in ticks; "" where the system does not tell; else None."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return ""
    state, *rest = fields.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]
