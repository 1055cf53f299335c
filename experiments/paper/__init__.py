"""What the paper measures, in the order of its sections."""
