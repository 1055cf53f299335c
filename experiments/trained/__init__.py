"""Code of the experiments with published trained networks, such as run_trained."""
