"""Code of run_stability: residual designs at several depths."""
