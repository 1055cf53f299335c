"""SHA256SUMS: the checksum of every file of a run, as `sha256sum -c` reads it.

A comment at its end holds the checksum of the run's config, so that a config.json that was deleted
is written again, and one of the lines above it.
"""

import hashlib
import os
from pathlib import Path

from rank_collapse.runs.files import RunError, damaged, write_atomically

NAME = "SHA256SUMS"
_CONFIG, _WHOLE = "# config ", "# lines "


class Manifest:
    """The checksums of one folder, and of the config, None where nothing is known of it.

    `begun` says whether the folder had none.
    """

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder) / NAME
        self.config: str | None = None
        self._sums: dict[str, str] = {}
        self.begun = not self.path.exists()
        if self.begun:
            return
        try:
            *lines, last = self.path.read_text().splitlines(keepends=True)
        except (OSError, ValueError) as error:
            raise damaged(self.path, error) from error
        if last.strip() != _WHOLE + text_sum("".join(lines)):
            raise damaged(self.path, "its checksum does not match")
        for line in lines:
            if line.startswith(_CONFIG):
                self.config = line.removeprefix(_CONFIG).strip()
            else:
                digest, _, name = line.rstrip("\n").partition("  ")
                self._sums[name] = digest

    def lacks(self, name: str) -> bool:
        """Whether a file is listed and not there."""
        return name in self._sums and not os.path.lexists(self.path.parent / name)

    def changed(self) -> list[str]:
        """Files that are there and are not as they were written."""
        return [name for name in self._sums if not self.has(name, absent=True)]

    def has(self, name: str, absent: bool = False) -> bool:
        """Whether a file is as it was written, or of no known checksum.

        Args:
            name: Below the folder.
            absent: The answer where there is no such file.
        """
        path = self.path.parent / name
        if not os.path.lexists(path):
            return absent
        if name not in self._sums:
            return True
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self._sums[name]
        except OSError:
            return False

    def forget(self, name: str) -> None:
        """Before a file is written again: an interruption leaves no file with an old checksum."""
        if self._sums.pop(name, None) is not None:
            self._write()

    def seal(self, names: set[str], config: str) -> None:
        """Adds files as they are now; those that are gone are left out.

        Args:
            names: Of the files that were written.
            config: Their config's checksum, from `text_sum`.
        """
        folder = self.path.parent
        before = self.config, dict(self._sums)
        self._sums |= dict.fromkeys(names, "")
        self._sums = {n: s for n, s in self._sums.items() if (folder / n).is_file()}
        for name in names & self._sums.keys():
            with open(folder / name, "rb") as file:
                self._sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        self.config = config
        if before != (self.config, self._sums) or not self.path.exists():
            self._write()

    def _write(self):
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(self._sums.items()))
        lines += "" if self.config is None else f"{_CONFIG}{self.config}\n"
        write_atomically(self.path, f"{lines}{_WHOLE}{text_sum(lines)}\n".encode())


def whole(folder: str | os.PathLike, name: str) -> bool:
    """Whether a folder has a file and checksums, and no file differs from its own."""
    if not (Path(folder) / name).exists():
        return False
    try:
        manifest = Manifest(folder)
    except RunError:
        return False
    return not (manifest.begun or manifest.changed())


def text_sum(text: str) -> str:
    """The checksum of a text; of a config that of its JSON with sorted keys."""
    return hashlib.sha256(text.encode()).hexdigest()
