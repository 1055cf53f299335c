"""Code of run_collapse: the residual after each layer of random networks."""
