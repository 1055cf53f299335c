"""Code of check_bounds: the paper's lemma and bounds, tested on random draws."""
