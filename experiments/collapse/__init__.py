"""What run_collapse makes of its measurements."""
