"""Residual designs against depth, dependency, updates and collapse: run_stability."""
