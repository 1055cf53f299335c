"""The paper's questions on weights that somebody trained: run_trained and trained_weights."""
