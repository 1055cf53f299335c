"""Ctrl-C, SIGTERM and SIGHUP: what is finished is saved, then the process ends.

A signal raises at once, save within JAX, whose compiler still uses in a thread what an exception
would free: there the call that we have made of it raises when it is done. In a callback of the
garbage collector, where Python ignores what is raised, and inside `deferred` it waits for the next
`check`; what was raised in the callback of a weak reference is raised again after it. The second
signal ends the process as it is, also where Python itself waits for a computation of minutes, as a
thread sees it.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(SystemExit):
    """A signal asked this process to end; the exit code is 128 + its number, as a shell has it."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


class _Process:
    """A process has one set of handlers."""

    asked: int | None = None
    deferred = False
    listening = False
    unraisable: Any = None  # the hook that was there before


def _handle(number: int, frame: Any) -> None:
    if _Process.asked is not None:
        os._exit(128 + number)
    _Process.asked = number
    if _Process.deferred:
        # print() may be what was interrupted.
        os.write(2, b"\nstopping when this chunk is saved; the second time at once\n")
        return
    call, ignored = None, False
    while frame is not None:
        if frame.f_code.co_name in ("_xla_gc_callback", "__del__"):
            call, ignored = None, True
        elif _is_of_jax(frame):
            call = frame  # in the end the outermost
        frame = frame.f_back
    if call is None and ignored:
        return
    if call is None:
        raise _error(number)
    os.write(2, b"\nstopping when this step is done; the second time at once\n")
    _raise_in(call, lines=False)


def _raise_in(frame, lines):
    """Raises what was asked for at the next line of a frame, or where it returns."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "return" or (lines and event == "line"):
            sys.settrace(None)
            check()
        return trace

    frame.f_trace, frame.f_trace_lines = trace, lines
    sys.settrace(lambda *_: None)  # without one no frame is traced


def _ignored(what):
    """In place of the message that an exception was ignored: of ours it is raised again."""
    if not isinstance(what.exc_value, (KeyboardInterrupt, Stopped)) or not asked():
        _Process.unraisable(what)
        return
    frame = place = sys._getframe().f_back
    call = None
    while frame is not None:
        call = frame if _is_of_jax(frame) else call
        frame = frame.f_back
    if not _Process.deferred and place is not None:
        _raise_in(call or place, lines=call is None)


def _is_of_jax(frame):
    jax, file = sys.modules.get("jax"), frame.f_code.co_filename
    return jax is not None and file.startswith(os.path.dirname(jax.__file__) + os.sep)


def _error(number):
    return KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)


def asked() -> bool:
    """Whether a signal has asked this process to end."""
    return _Process.asked is not None


def check() -> None:
    """Raises what a signal asked for, if one has: KeyboardInterrupt or `Stopped`."""
    if _Process.asked is not None:
        raise _error(_Process.asked)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Meanwhile a signal waits for the next `check`."""
    before, _Process.deferred = _Process.deferred, True
    try:
        yield
    finally:
        _Process.deferred = before


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Signals are handled as above meanwhile; inside another such block nothing changes.

    One that is ignored, as SIGHUP under nohup, stays ignored.
    """
    if _Process.listening or threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {n: signal.getsignal(n) for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN}
    _Process.listening, _Process.asked = True, None
    _Process.unraisable, sys.unraisablehook = sys.unraisablehook, _ignored
    for number in earlier:
        signal.signal(number, _handle)
    try:
        with _second_ends(earlier):
            yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        sys.unraisablehook = _Process.unraisable
        _Process.listening, _Process.asked = False, None


@contextlib.contextmanager
def _second_ends(numbers):
    """A thread that ends the process at the second of these signals.

    The main thread runs no handler before it is back in Python; Python writes a signal's number to
    the wake-up file at once.
    """
    ours, written = os.pipe()
    os.set_blocking(written, False)
    before = signal.set_wakeup_fd(written, warn_on_full_buffer=False)

    def listen():
        seen = 0
        while found := os.read(ours, 1):
            seen += found[0] in numbers
            if seen == 2:
                os._exit(128 + found[0])
        os.close(ours)

    threading.Thread(target=listen, daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(written)
