"""Code that all experiments with training share."""
