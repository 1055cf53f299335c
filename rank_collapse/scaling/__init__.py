"""Checks whether a deeper network will train, and scales its weights and learning rates."""
