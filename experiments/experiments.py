"""Answers `python experiments/run_sort.py`, and `python run_sort.py` in this folder, with the right
command.

Python then looks for modules in this folder, and finds this file instead of the package.
"""

import shlex
import sys
from pathlib import Path

_clone, _words = Path(__file__).resolve().parents[1], sys.argv
_command = shlex.join(["python", "-m", f"experiments.{Path(_words[0]).stem}", *_words[1:]])
_text = f"error: experiments is a package; in the folder {_clone} type: {_command}"
print("".join(c if c.isprintable() else ascii(c)[1:-1] for c in _text), file=sys.stderr)
sys.exit(2)
