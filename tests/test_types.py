"""Types of the public API as an editor that checks strictly sees them."""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

import rank_collapse as rc

NOT_OURS = ("Any", "TYPE_CHECKING", "annotations", "importlib")


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is missing"),
]


def diagnostics(folder, text):
    """What pyright says of a file."""
    (folder / "use.py").write_text(text)
    settings = {"extraPaths": [str(REPOSITORY)], "pythonPath": sys.executable}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", folder], capture_output=True, text=True)
    return json.loads(done.stdout)["generalDiagnostics"]


def test_nothing_of_the_public_api_is_unknown(tmp_path):
    used = (REPOSITORY / "tests" / "typed_use.py").read_text("utf-8")
    names = [name for name in vars(rc) if not name.startswith("_") and name not in NOT_OURS]
    found = diagnostics(tmp_path, used + "".join(f"reveal_type(rc.{name})\n" for name in names))
    errors = [d["message"] for d in found if d["severity"] == "error"]
    assert not errors, "\n".join(errors)
    revealed = [d["message"] for d in found if d["severity"] == "information"]
    assert len(revealed) == len(names) > 80
    assert not [message for message in revealed if "Unknown" in message]


def test_wrong_names_and_choices_are_found(tmp_path):
    text = (REPOSITORY / "tests" / "typed_mistakes.py").read_text("utf-8")
    found = {d["range"]["start"]["line"] for d in diagnostics(tmp_path, text)}
    assert found == {i for i, line in enumerate(text.splitlines()) if "# mistake" in line}
