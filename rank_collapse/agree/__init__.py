"""Compares two runs of one model: the first layer at which they differ by more than rounding."""
