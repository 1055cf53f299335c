"""Watching a model of PyTorch, Flax or Equinox while it trains.

`rank_collapse.torch.watch` is the public place for PyTorch.
"""
