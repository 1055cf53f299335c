"""The documentation's job: pages, examples, pictures, public names, types, commands and the wheel.

`python -m pytest tests_docs` runs it; the usual run of the tests leaves it out. Examples run as
users run them: without the checks that the other suite adds.
"""

import os

os.environ.setdefault("MPLBACKEND", "Agg")

from compiling import pytest_configure  # noqa: F401
