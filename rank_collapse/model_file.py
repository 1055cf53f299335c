"""Trained networks in one file, under the path they had before `rank_collapse.training`."""

from rank_collapse.training.model_file import dump_models, load_models

__all__ = ["dump_models", "load_models"]
