"""Runs the traced program of a user's function with sums of paths in place of arrays."""
