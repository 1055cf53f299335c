"""Measures of a network layer by layer, in one pass over it."""
