"""Accuracy by path length of trained networks: run_sort, run_convex_hull, run_memorization."""
