"""Run folders: what one run of an experiment leaves on disk, its seeds and saved states."""

from rank_collapse.runs.folder import (
    RunError,
    RunFolder,
    difference,
    make_folder,
    read_summary,
    write_atomically,
)

__all__ = [
    "RunError",
    "RunFolder",
    "difference",
    "make_folder",
    "read_summary",
    "write_atomically",
]
