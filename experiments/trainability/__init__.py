"""Which residual designs train at which depth, and why: run_trainability."""
