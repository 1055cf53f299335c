"""What run_architectures makes of its measurements."""
