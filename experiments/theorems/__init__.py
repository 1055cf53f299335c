"""Code of run_theorems: one file for each subject of theorems about tokens."""
