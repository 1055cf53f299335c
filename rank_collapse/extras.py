"""The extras of the package: their modules, and the error for a missing one."""

import importlib
from typing import Any

# As in pyproject.toml. Packages and not the extra are named to users: that works in a clone too.
PACKAGES = {
    "exact": "python-flint",
    "flax": "flax",
    "gguf": "gguf",
    "hub": "huggingface_hub",
    "pretrained": "safetensors tokenizers sentencepiece",
    "report": "matplotlib scipy pillow",
    "training": "optax safetensors xarray",
}


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed.

    Args:
        feature: Name of the feature that needs it.
        error: Error of its import.
        extra: One of `PACKAGES`.
        instead: Description of an alternative without it.
    """

    def __init__(self, feature: str, error: ImportError, extra: str, instead: str = ""):
        package = str(error.name).partition(".")[0]
        super().__init__(
            f"{feature} needs {package}, which is not installed: pip install {PACKAGES[extra]} "
            f"(the extra {extra!r}){instead and f'; {instead}'}",
            name=package,
        )


def import_package(package: str, feature: str, extra: str, instead: str = "") -> Any:
    """Import a package of an extra.

    Args:
        package: Name of the package.
        feature, extra, instead: See `MissingPackage`.

    Raises:
        MissingPackage: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackage(feature, error, extra, instead) from None
