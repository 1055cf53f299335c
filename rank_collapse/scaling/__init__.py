"""Whether a deeper or wider network will train: a check over depths, and depth parametrisations."""
