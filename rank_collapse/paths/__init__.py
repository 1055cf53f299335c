"""Paths through a network: counted, sampled, evaluated one by one, and summed by length."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
