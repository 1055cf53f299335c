"""Answers like experiments.py, for a script of this folder that imports the library first."""

import experiments  # noqa: F401
