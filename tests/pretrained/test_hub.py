"""Names on the Hugging Face hub: what is asked of it, and one line where it cannot answer."""

import sys
import types
from fnmatch import fnmatch

import pytest

from rank_collapse import pretrained
from rank_collapse.pretrained.hub import hub_folder, is_hub_name

INSTEAD = "hf download EleutherAI/pythia-70m --revision step1 --local-dir pythia-70m"


def hub_of(monkeypatch, download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_names():
    assert is_hub_name("hf:gpt2") and not is_hub_name("gpt2") and not is_hub_name({"model_type": 1})


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="huggingface_hub, which is not installed: pip") as error:
        pretrained.load("hf:EleutherAI/pythia-70m@step1")
    assert INSTEAD in str(error.value) and "\n" not in str(error.value)


def test_without_internet(monkeypatch):
    def download(*_, **__):
        raise ConnectionError("no route\nto host")

    hub_of(monkeypatch, download)
    with pytest.raises(FileNotFoundError, match="no route to host; give a folder") as error:
        pretrained.settings_of("hf:EleutherAI/pythia-70m@step1")
    assert INSTEAD in str(error.value)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "README.md"])
def test_weights_in_the_safer_format_where_there_are_some(monkeypatch, tmp_path, file):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        if any(fnmatch(file, pattern) for pattern in allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    hub_of(monkeypatch, download)
    if file == "README.md":
        with pytest.raises(FileNotFoundError, match=r"hf:gpt2: there are none of model\.safe"):
            hub_folder("hf:gpt2")
    else:
        assert hub_folder("hf:gpt2") == tmp_path
    assert all(a[:2] == ("gpt2", None) and "config.json" in a[2] for a in asked)
    assert len(asked) == (1 if file == "model.safetensors" else 2)
