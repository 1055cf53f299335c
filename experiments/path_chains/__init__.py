"""What run_path_chains makes of its measurements."""
