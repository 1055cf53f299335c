"""Types of the public API as an editor that checks strictly sees them."""

import importlib.util
import json
import subprocess
import sys

import pytest

import rank_collapse as rc
from tests.support.folders import REPOSITORY

HERE = REPOSITORY / "tests_docs"
PACKAGES = ("measures", "network", "paths", "theory")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is missing"
)


def run_pyright(folder, text):
    """Runs pyright on a file; returns its diagnostics."""
    (folder / "use.py").write_text(text)
    settings = {"extraPaths": [str(REPOSITORY)], "pythonPath": sys.executable}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", folder], capture_output=True, text=True)
    return json.loads(done.stdout)["generalDiagnostics"]


def test_nothing_of_the_public_api_is_unknown(tmp_path):
    use = (HERE / "typed_use.py").read_text("utf-8")
    names = [f"rc.{name}" for name in rc.__all__]
    names += [f"rc.{p}.{name}" for p in PACKAGES for name in getattr(rc, p).__all__]
    reports = run_pyright(tmp_path, use + "".join(f"reveal_type({name})\n" for name in names))
    errors = [d["message"] for d in reports if d["severity"] == "error"]
    assert not errors, "\n".join(errors)
    revealed = [d["message"] for d in reports if d["severity"] == "information"]
    assert len(revealed) == len(names)
    assert not [message for message in revealed if "Unknown" in message]


def test_wrong_names_and_choices_are_found(tmp_path):
    text = (HERE / "typed_mistakes.py").read_text("utf-8")
    lines = {d["range"]["start"]["line"] for d in run_pyright(tmp_path, text)}
    assert lines == {i for i, line in enumerate(text.splitlines()) if "# mistake" in line}
