"""Checkpoints by their name on the Hugging Face hub: the local folder of one, fetched when absent.

Needs the package huggingface_hub; everything else in this package reads folders.
"""

from pathlib import Path

from rank_collapse.extras import import_package
from rank_collapse.pretrained.checkpoint import WEIGHT_FILES
from rank_collapse.printed import format_one_line

PREFIX = "hf:"
# What a model and its tokenizer are read from; weights in the safer format where there are both.
_BESIDE = [
    "config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece*",
]
_WEIGHTS = (["model*.safetensors", "*.safetensors.index.json"], ["pytorch_model*.bin*"])


def is_hub_name(source: object) -> bool:
    """Check whether a source is "hf:owner/name" or "hf:owner/name@revision", no folder."""
    return isinstance(source, str) and source.startswith(PREFIX)


def hub_folder(source: str) -> Path:
    """Find the folder of a model of the hub, in the local cache or downloaded.

    Args:
        source: "hf:gpt2", "hf:EleutherAI/pythia-70m@step1000" with a branch, tag or commit.

    Raises:
        FileNotFoundError: No such model, no internet or no weights; the message says how to get a
            folder.
        MissingPackage: No huggingface_hub.
    """
    name, _, revision = source.removeprefix(PREFIX).partition("@")
    at = f" --revision {revision}" if revision else ""
    instead = (
        "give a folder instead: on a machine with internet, "
        f"hf download {name}{at} --local-dir {name.rsplit('/', 1)[-1]}"
    )
    hub = import_package("huggingface_hub", source, "hub", instead)
    for weights in _WEIGHTS:
        try:
            folder = hub.snapshot_download(
                name, revision=revision or None, allow_patterns=_BESIDE + weights
            )
        except Exception as error:  # of several HTTP libraries; none is ours to handle
            raise FileNotFoundError(f"{source}: {format_one_line(error, 120)}; {instead}") from None
        folder = Path(folder)
        if any((folder / file).is_file() for file in WEIGHT_FILES):
            return folder
    raise FileNotFoundError(f"{source}: there are none of {', '.join(WEIGHT_FILES)}")
