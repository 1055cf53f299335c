"""Finds the first layer at which two runs of one model differ by more than rounding."""
