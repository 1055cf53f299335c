"""Writes the report and the pages of `experiments.reproduce` from all run folders."""
