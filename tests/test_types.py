"""Types of the public API as an editor that checks strictly sees them."""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

import rank_collapse as rc

NOT_OURS = ("Any", "TYPE_CHECKING", "annotations", "importlib")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_nothing_of_the_public_api_is_unknown(tmp_path):
    used = (REPOSITORY / "tests" / "typed_use.py").read_text("utf-8")
    names = [name for name in vars(rc) if not name.startswith("_") and name not in NOT_OURS]
    shown = "".join(f"reveal_type(rc.{name})\n" for name in names)
    (tmp_path / "use.py").write_text(used + shown)
    settings = {"extraPaths": [str(REPOSITORY)], "pythonPath": sys.executable}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", tmp_path], capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [d["message"] for d in found if d["severity"] == "error"]
    assert not errors, "\n".join(errors)
    revealed = [d["message"] for d in found if d["severity"] == "information"]
    assert len(revealed) == len(names) > 80
    assert not [message for message in revealed if "Unknown" in message]
