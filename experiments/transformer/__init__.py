"""What run_transformer trains, measures and shows."""
