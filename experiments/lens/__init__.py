"""Code of run_lens: the exact Jacobian of trained networks by path length."""
