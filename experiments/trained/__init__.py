"""The paper's questions, asked of published trained networks: run_trained and trained_weights."""
