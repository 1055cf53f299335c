"""The technical lemma and the bounds on random draws: check_bounds."""
