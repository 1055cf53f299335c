"""What run_width trains, measures and shows."""
