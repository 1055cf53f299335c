"""Files of a run: written whole; metrics by step, figures."""

from rank_collapse.runs.files import (
    RunError as RunError,
    make_folder as make_folder,
    write_atomically as write_atomically,
)
