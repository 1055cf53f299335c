"""Rank collapse in attention networks, in JAX.

Axis letters, used in annotations and einsum strings alike:
n tokens (queries), m keys, d model width, f MLP width, h heads, k per-head query/key width,
v per-head value width, l layers, s seeds, b batch, p paths, c classes.

Names are imported when they are first used; `__init__.pyi` lists them.
"""

from typing import Any

import lazy_loader

from rank_collapse.extras import MissingPackage

__version__ = "1.0.0"

_import_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_EXTRAS = {"flax": "flax", "flint": "exact", "matplotlib": "report", "optax": "training"}


def __getattr__(name: str) -> Any:
    try:
        return _import_name(name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS or isinstance(error, MissingPackage):
            raise
        raise MissingPackage(f"rank_collapse.{name}", error, _EXTRAS[error.name]) from error
