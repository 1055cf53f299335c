"""Benchmarks, one file for each subject."""
