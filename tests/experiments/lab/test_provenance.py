"""What a run folder says of the environment and the checkout that wrote it."""

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.lab import provenance
from experiments.lab.folder import RunFolder

CONFIG = {"depth": 3, "scales": (0.5, 1.0), "name": "a"}


def test_a_folder_names_every_environment_that_wrote_into_it(tmp_path, monkeypatch):
    """The commit that began it and those that measured; apart from them one that only redrew.

    None that only read, or wrote the same, is listed.
    """
    here = provenance.environment()

    def enter(**changes):
        changed = here | {"started": "2038-01-19 03:14:07", "num_devices": 7} | changes
        monkeypatch.setattr(provenance, "environment", lambda: changed)

    def write(name):
        with RunFolder(tmp_path, CONFIG) as run:
            run.at("view/").save_arrays({name: np.ones(2)})

    enter(git="a1")
    write("a")
    enter(git="b2")
    with RunFolder(tmp_path, CONFIG) as run:
        assert run.resumed
    write("b")
    write("c")
    enter(git="b2", versions=here["versions"] | {"jax": "0.11"})
    write("d")
    enter(git="a1")
    write("e")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert provenance.list_commits(saved) == "a1 and b2"
    assert provenance.list_versions(saved, "jax") == f"{jax.__version__} and 0.11"
    environments = [(e["git"], e["versions"]["jax"]) for e in provenance.list_environments(saved)]
    assert environments == [("a1", jax.__version__), ("b2", jax.__version__), ("b2", "0.11")]
    assert provenance.list_commits({"environment": here | {"git": None}}) == ""
    for commit in ("c3", "c3", "b2", "d4"):
        enter(git=commit)
        with RunFolder(tmp_path, CONFIG) as run:  # which makes a table of the others' arrays
            run.save_table([{"x": commit}])
            run.finish({})
    saved = json.loads((tmp_path / "config.json").read_text())
    assert provenance.list_commits(saved) == "a1 and b2"
    redrawn = provenance.read_environments(saved, provenance.REDRAWN)
    assert [e["git"] for e in redrawn] == ["c3", "d4"]
    enter(git="c3")
    with RunFolder(tmp_path, CONFIG) as run:  # which first draws, then measures
        run.save_table([{"x": 2}])
        run.save_checkpoint(1, {"w": np.ones(2)})
    saved = json.loads((tmp_path / "config.json").read_text())
    assert provenance.list_commits(saved) == "a1 and b2 and c3"


def read_git_revision(folder):
    """Calls `provenance.git_revision` of the copy of its module in a folder."""
    spec = importlib.util.spec_from_file_location("copied", folder / "provenance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.git_revision()


def test_the_git_revision_is_that_of_the_checkout_with_its_changes_or_none(tmp_path):
    copied = tmp_path / "provenance.py"
    shutil.copy(provenance.__file__, copied)

    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert read_git_revision(tmp_path) is None
    git("init")
    assert read_git_revision(tmp_path) is None  # a checkout around it, but not its own
    git("add", copied.name)
    git("commit", "--message=first", "--no-verify")
    assert read_git_revision(tmp_path) == git("rev-parse", "HEAD")
    copied.write_text(copied.read_text() + "\n")
    assert read_git_revision(tmp_path) == git("rev-parse", "HEAD") + "-dirty"


def test_new_environments_are_each_listed_once_and_what_is_none_is_not():
    here = {"git": "a1", "python": "3.12", "started": "now", "num_devices": 2}
    later, other = here | {"started": "later", "num_devices": 7}, here | {"git": "b2"}
    assert provenance.find_new([here, later, other, other], []) == [here, other]
    assert provenance.find_new([later, other], [here]) == [other]
    assert provenance.list_environments({"environment": None, "later": [None, here]}) == [here]
    assert provenance.list_environments({}) == []


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("model name\t: Fast: 3 GHz\ncores\t: 2\n\nmodel name\t: Slow\n", "Fast: 3 GHz"),
        ("Processor\t: another\n", "arm64"),  # as on ARM
        (None, "arm64"),  # as on macOS
    ],
)
def test_a_processor_is_named_as_far_as_the_system_says(content, name, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(provenance, "Path", {"/proc/cpuinfo": path}.__getitem__)
    monkeypatch.setattr(provenance.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(provenance.os, "cpu_count", lambda: 3)
    assert provenance.processor_name() == f"{name}, 3 cores"


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("git", 10)])
def test_without_git_there_is_no_revision(error, monkeypatch):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(provenance.subprocess, "run", refuse)
    assert provenance.git_revision() is None


def test_an_environment_is_that_of_this_process(monkeypatch):
    """Three devices of an accelerator, which have a name of their own."""
    device = SimpleNamespace(device_kind="NVIDIA H200", platform="gpu")
    monkeypatch.setattr(provenance.jax, "devices", lambda: [device] * 3)
    monkeypatch.setattr(provenance.jax, "default_backend", lambda: "gpu")
    for name in ("processor_name", "git_revision"):
        monkeypatch.setattr(provenance, name, lambda name=name: name)
    described = provenance.environment()
    started = time.strptime(described.pop("started"), "%Y-%m-%d %H:%M:%S")
    assert abs(time.mktime(started) - time.time()) < 60
    versions = described.pop("versions")
    assert (versions["numpy"], versions["jax"]) == (np.__version__, jax.__version__)
    assert described == {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "backend": "gpu",
        "device": "NVIDIA H200",
        "processor": "processor_name",
        "num_devices": 3,
        "git": "git_revision",
    }
