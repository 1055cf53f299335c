"""The experiments' commands, `python -m experiments.run_sort` and others."""

import importlib
import importlib.util
import signal
import sys

NEEDED = (
    "absl",
    "flax",
    "matplotlib",
    "optax",
    "safetensors",
    "scipy",
    "tokenizers",
    "tqdm",
    "xarray",
)

# Python calls a program of `-m` this while it imports it.
if sys.argv[:1] == ["-m"]:
    # Until the binary handles signals itself, Ctrl-C ends it, without the traceback of whatever
    # import it interrupts.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        text = "the experiments need `pip install -r requirements.txt`; not installed: "
        print(f"error: {text}{', '.join(missing)}", file=sys.stderr)
        sys.exit(2)
