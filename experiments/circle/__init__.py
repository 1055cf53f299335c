"""Code of run_circle: attention brings two walkers on a circle together."""
