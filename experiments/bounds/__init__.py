"""The lemma and the bounds on random draws."""
