"""Writes and reads the files of a run: metrics by step, results of seeds, saved states."""

from rank_collapse.runs.files import (
    RunError as RunError,
    describe_difference as describe_difference,
    make_folder as make_folder,
    write_atomically as write_atomically,
)
