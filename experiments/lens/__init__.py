"""The exact Jacobian of trained networks by path length: run_lens."""
