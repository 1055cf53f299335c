"""Measures a network layer by layer, in one pass through its layers."""
