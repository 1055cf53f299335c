"""Code of run_sort, run_convex_hull and run_memorization: accuracy by path length."""
