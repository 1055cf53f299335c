"""Traced programs of anyone's functions, run again with sums of paths by length."""
