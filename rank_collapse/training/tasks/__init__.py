"""Makes the data of the paper's trained tasks from a random key, and measures the accuracy."""
