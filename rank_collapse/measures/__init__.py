"""Measures how far tokens are from rank one: norms, residuals, ranks, profiles by layer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
