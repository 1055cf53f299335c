"""The residual with depth, at initialisation: run_collapse."""
