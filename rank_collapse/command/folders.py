"""Folders that are not Hugging Face checkpoints: their kind, and the command that converts them."""

import shlex
from pathlib import Path

from rank_collapse.checks import refuse_if
from rank_collapse.pretrained.checkpoint_files import WEIGHT_FILES
from rank_collapse.text.text_files import read_json

_TRANSFORMERS = (
    'with transformers below 5: python -c "import transformers as t; '
    "t.AutoModel.from_pretrained('{folder}', {flag}=True).save_pretrained('{new}')\""
)
# nanoGPT has weights [out, in] where GPT-2 of transformers has [in, out].
_NANOGPT = (
    "python -c \"import torch, transformers as t; s = torch.load('{file}', map_location='cpu'); "
    "a, names = s['model_args'], ('vocab_size', 'n_embd', 'n_layer', 'n_head'); "
    "m = t.GPT2LMHeadModel(t.GPT2Config(**{{k: a[k] for k in names}}, "
    "n_positions=a['block_size'], activation_function='gelu')); "
    "w = {{n.removeprefix('_orig_mod.'): v for n, v in s['model'].items()}}; "
    "m.load_state_dict({{n: v.T if v.ndim == 2 and '.h.' in n else v for n, v in w.items()}}, "
    "strict=False); m.save_pretrained('{new}')\""
)
# {a file of the folder: (what the folder is, the command that makes a checkpoint of it)}
PROGRAMS = {
    "zero_to_fp32.py": (
        "a checkpoint of DeepSpeed, in parts",
        "python {file} {folder} {folder} --safe_serialization",
    ),
    "ckpt.pt": ("a checkpoint of nanoGPT", _NANOGPT),
    "flax_model.msgpack": ("a checkpoint of Flax", _TRANSFORMERS.replace("{flag}", "from_flax")),
    "tf_model.h5": ("a checkpoint of TensorFlow", _TRANSFORMERS.replace("{flag}", "from_tf")),
}


def check_folder(folder: Path) -> None:
    """Check that a folder could be a checkpoint of Hugging Face.

    Raises:
        ValueError: The folder belongs to another program; the message has the command that helps.
    """
    has_config = (folder / "config.json").is_file()
    if has_config and any((folder / name).is_file() for name in WEIGHT_FILES):
        return
    for name, (kind, command) in PROGRAMS.items():
        file = folder if folder.name == name else folder / name
        if file.is_file():
            places = {"file": file, "folder": file.parent, "new": file.parent / "converted"}
            quote = str if "-c" in command.split() else shlex.quote  # code has its own quotes
            names = {place: quote(str(path)) for place, path in places.items()}
            raise ValueError(f"{folder} is {kind}; convert it: {command.format(**names)}")
    kind, checkpoint = _look_inside(folder, has_config)
    command = f"rank-collapse check {shlex.quote(str(checkpoint))}"
    refuse_if(checkpoint, f"{folder} is {kind}: {command}")


def _look_inside(folder, has_config):
    """Find what kind of folder this is, and which folder inside or around it holds the checkpoint.

    Args:
        folder: A folder without a checkpoint that can be opened.
        has_config: Whether it has a config.json.

    Returns:
        (description of the folder, the other folder; None if it is unknown).
    """
    if has_config and "word_embedding_dimension" in read_json(folder / "config.json"):
        return "a layer of sentence-transformers without attention", folder.parent
    if (folder / "modules.json").is_file():
        inner = (path.parent for path in sorted(folder.glob("*/config.json")))
        return "a model of sentence-transformers", next(inner, None)
    steps = {path.name[11:]: path for path in folder.glob("checkpoint-*")}
    last = max(filter(str.isdecimal, steps), key=int, default=None)
    return "the run of a Trainer", steps.get(last)
