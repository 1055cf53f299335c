"""Chained attention and the size of paths by length: run_path_chains."""
