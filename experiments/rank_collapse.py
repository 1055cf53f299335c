"""As experiments.py of this folder: found in place of the library where that is imported first."""

import experiments  # noqa: F401
