"""A checkpoint folder as Hugging Face saves it: its config and its tensors, read one at a time.

Formats: model.safetensors, its sharded form with an index, pytorch_model.bin and its sharded form.
The folder is only read, and no pickled code is executed.
"""

import os
from pathlib import Path
from typing import Any

from rank_collapse.pretrained.published import suggest_names
from rank_collapse.pretrained.tensors import Tensors, list_tensors
from rank_collapse.printed import quote_value
from rank_collapse.struct import refuse_if
from rank_collapse.text.files import read_json

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """Read the config.json of a checkpoint folder.

    Raises:
        FileNotFoundError: No such folder, or no config.json in it.
        NotADirectoryError: A file in the place of the folder.
        ValueError: A config.json that is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        if folder.exists():
            gguf = "; a .gguf file has to be converted" if folder.suffix == ".gguf" else ""
            raise NotADirectoryError(
                f"{folder} is a file; a checkpoint is the folder it is in{gguf}"
            )
        hint = suggest_names(folder)
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist{hint}")
    refuse_if(
        (folder / "adapter_config.json").exists(),
        f"{folder} holds an adapter of peft (adapter_config.json), which is not measured: save the "
        "merged model, model.merge_and_unload().save_pretrained(FOLDER)",
    )
    refuse_if(
        not (folder / "config.json").exists() and any(folder.glob("*.gguf")),
        f"{folder} holds a .gguf file and no config.json: convert it, "
        "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(NEW)",
    )
    return read_json(folder / "config.json")


def open_weights(folder: str | os.PathLike) -> Tensors:
    """List the tensors of a checkpoint folder by name.

    Raises:
        FileNotFoundError: No weight file, or a shard missing.
        ValueError: A file that is cut short or damaged, or whose package is not installed.
    """
    folder = Path(folder)
    first = next((folder / f for f in WEIGHT_FILES if (folder / f).is_file()), None)
    if first is None:
        raise FileNotFoundError(f"{folder} holds none of {', '.join(WEIGHT_FILES)}")
    if first.suffix != ".json":
        return Tensors(folder, first.name, list_tensors(first))
    weight_map = read_json(first).get("weight_map")
    has_names = isinstance(weight_map, dict) and all(
        isinstance(shard, str) for shard in weight_map.values()
    )
    refuse_if(not has_names, f"{first} has no weight_map of names of files")
    for shard in sorted(set(weight_map.values())):
        place = Path(shard)
        refuse_if(
            place.is_absolute() or ".." in place.parts,
            f"{first} names {quote_value(shard)}, which is outside of its folder",
        )
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder / shard}, named by {first.name}, is missing")
    shards = {shard: list_tensors(folder / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        refuse_if(
            name not in shards[shard], f"tensor {quote_value(name)} of {first} is not in {shard}"
        )
    return Tensors(folder, first.name, {n: shards[shard][n] for n, shard in weight_map.items()})
