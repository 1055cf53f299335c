"""Measures how similar tokens are, and where they attend: residuals, ranks, norms, entropy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
