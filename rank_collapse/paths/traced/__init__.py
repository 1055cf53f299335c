"""Traced programs of users' functions, run again with sums of paths by length."""
