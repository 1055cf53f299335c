"""Benchmarks, one file a subject."""
