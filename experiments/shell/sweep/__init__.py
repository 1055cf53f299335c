"""Sweeps: `--sweep` of any binary, a grid of its runs that many processes share"""
