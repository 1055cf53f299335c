"""Counts and samples paths through a network, and sums their contributions by length."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
