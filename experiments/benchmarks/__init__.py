"""Measures speed and memory; one file for each subject."""
