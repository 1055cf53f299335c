"""The experiments' commands, `python -m experiments.run_sort` and others."""

import signal
import sys

# Python calls a program of `-m` this while it imports it: until the binary handles signals itself,
# Ctrl-C ends it, without the traceback of whatever import it interrupts.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
