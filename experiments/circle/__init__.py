"""What run_circle makes of its measurements."""
