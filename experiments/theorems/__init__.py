"""Theorems about token dynamics, one subject a file, evaluated through the toolkit's networks."""
