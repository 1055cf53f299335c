"""How many paths have each length: run_path_counts."""
