"""Folders that hold a checkpoint of Hugging Face elsewhere: which folder is it."""

from pathlib import Path

from rank_collapse.pretrained.checkpoint import WEIGHT_FILES
from rank_collapse.struct import refuse_if
from rank_collapse.text.files import read_json


def check_folder(folder: Path) -> None:
    """Checks that a folder could be a checkpoint of Hugging Face.

    Args:
        folder: That a command was given.

    Raises:
        ValueError: The checkpoint is another folder, which the message names.
    """
    has_config = (folder / "config.json").is_file()
    if has_config and any((folder / name).is_file() for name in WEIGHT_FILES):
        return
    kind, checkpoint = _look_inside(folder, has_config)
    refuse_if(checkpoint, f"{folder} is {kind}: rank-collapse check {checkpoint}")


def _look_inside(folder, has_config):
    """Returns (what the folder is, which other folder is the checkpoint); None for unknown."""
    if has_config and "word_embedding_dimension" in read_json(folder / "config.json"):
        return "a layer of sentence-transformers without attention", folder.parent
    if (folder / "modules.json").is_file():
        inner = (path.parent for path in sorted(folder.glob("*/config.json")))
        return "a model of sentence-transformers", next(inner, None)
    steps = {path.name[11:]: path for path in folder.glob("checkpoint-*")}
    last = max(filter(str.isdecimal, steps), key=int, default=None)
    return "the run of a Trainer", steps.get(last)
