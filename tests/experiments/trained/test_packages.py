"""Folders of packages: an interrupt leaves the folder of before."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from experiments.trained import generated_texts, packages
from experiments.trained.generated_texts import KINDS


def test_an_interrupt_leaves_the_folder_of_before(tmp_path):
    def make(weights, folder):
        (folder / "config.json").write_text(weights)
        if weights == "new":
            raise KeyboardInterrupt

    package = packages.Package("a==1", "MIT", "w", "0", make)
    packages.make_folder(package, "old", tmp_path / "made")
    with pytest.raises(KeyboardInterrupt):
        packages.make_folder(package, "new", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / "config.json").read_text() == "old"
    packages.make_folder(package, "newer", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made" / "config.json").read_text() == "newer"


def write_checkpoint(folder, suffix):
    """Writes a checkpoint of a package: vocabulary one folder higher, tokenizer, weights."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/config.json").write_text('{"vocab_size": 4, "model_type": "mine"}')
    words = sorted({word for kind in KINDS.values() for word in kind(random.Random(1))})
    (folder / "vocab.txt").write_text("\n".join(["[CLS]", "[SEP]", *words]))
    (folder / "model/tokenizer.json").write_text("{}")
    (folder / f"model/weights{suffix}").write_bytes(b"weights")
    return folder / f"model/weights{suffix}"


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_a_checkpoint_keeps_its_files_and_gets_what_it_lacks(suffix, tmp_path, monkeypatch):
    """Torch weights are converted and not copied; entries of the package's config.json yield."""
    weights, made = write_checkpoint(tmp_path / "package", suffix), tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr(packages.convert, "read_torch", lambda path: {"w": path.name})
    monkeypatch.setattr(
        packages.convert,
        "write_tensors",
        lambda folder, tensors: (folder / "model.safetensors").write_text(str(tensors)),
    )
    packages.copy_checkpoint(weights, made, model_type="bert", vocabulary="../vocab.txt")
    is_torch = suffix == ".bin"
    name = "model.safetensors" if is_torch else weights.name
    files = {path.name: path.read_text() for path in made.iterdir()}
    assert files.keys() == {"config.json", "vocab.txt", "tokenizer.json", name}
    assert json.loads(files["config.json"]) == {"vocab_size": 4, "model_type": "bert"}
    assert files[name] == ("{'w': 'weights.bin'}" if is_torch else "weights")
    monkeypatch.setattr(
        generated_texts, "write_ids", lambda kind, words: f"{kind} {words[:2]} {len(words)}"
    )
    packages.copy_checkpoint(
        weights, made, kind="reactions", vocabulary="../vocab.txt", vocab_size=9
    )
    count = len((tmp_path / "package/vocab.txt").read_text().splitlines())
    assert (made / "ids.txt").read_text() == f"reactions ['[CLS]', '[SEP]'] {count}"
    config = json.loads((made / "config.json").read_text())
    assert config == {"vocab_size": 9, "model_type": "mine"}


def test_spectrograms_of_whisper_have_its_bins_and_frames(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(packages.convert, "from_ctranslate2", lambda *paths: made.append(paths))
    monkeypatch.setattr(
        generated_texts, "draw_spectrograms", lambda bins, frames: np.full((1, bins), frames)
    )
    packages.make_whisper("weights", tmp_path)
    assert made == [("weights", tmp_path)]
    np.testing.assert_array_equal(np.load(tmp_path / "features.npy"), np.full((1, 80), 3000))


def install(site, name, version, weights=None):
    about = site / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if weights is not None:
        (site / "w").write_bytes(weights)


def test_weights_are_those_of_the_version_that_is_asked_for(tmp_path):
    digest = hashlib.sha256(b"weights").hexdigest()
    package = packages.Package("networks==1.2", "MIT", "w", digest, None)
    assert packages.find_weights(package, str(tmp_path)) is None
    install(tmp_path / "a", "networks", "1.2", b"weights")
    assert packages.find_weights(package, str(tmp_path / "a")) == tmp_path / "a" / "w"
    for name, version in (("b", "1.3"), ("c", "1.1")):
        install(tmp_path / name, "networks", version, b"weights")
        refusal = rf"networks {version} is installed, not networks==1\.2"
        with pytest.raises(ValueError, match=refusal):
            packages.find_weights(package, str(tmp_path / name))
    install(tmp_path / "d", "networks", "1.2")
    (tmp_path / "d" / "w").mkdir()  # a folder in the place of the file
    with pytest.raises(ValueError, match="is installed without its weights"):
        packages.find_weights(package, str(tmp_path / "d"))
    prefix = digest[:8] + 56 * "0"
    with pytest.raises(ValueError, match="another SHA-256"):
        packages.find_weights(package._replace(sha256=prefix), str(tmp_path / "a"))


def test_without_a_folder_the_packages_of_this_python_are_searched():
    path = Path(np.__file__)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    version = f"numpy=={np.__version__}"
    package = packages.Package(version, "BSD", "numpy/__init__.py", digest, None)
    assert packages.find_weights(package, None).samefile(path)
    assert packages.find_weights(package._replace(requirement="no-such-package==1"), None) is None
