"""Residual designs against depth: dependency, output change, collapse and gradients: run_stability."""
