"""What run_circle trains, measures and shows."""
