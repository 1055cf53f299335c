"""Computes what theory says about collapse: residuals in logarithms, bounds and rates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
