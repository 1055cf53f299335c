"""Residual designs at several depths: branch shares, updates and collapse: run_stability."""
