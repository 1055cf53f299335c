"""Signs of life between the processes of a run: one that stands still ends the others in a line.

A process that ends closes its connections, which the others see; one that is stopped (SIGSTOP, a
host that hangs) does not, and `jax.distributed` ends the others by SIGABRT after 100 seconds. Each
process sends a datagram every few seconds to all others. One from which nothing ever came, as
behind a firewall, is not waited for.
"""

import contextlib
import os
import secrets
import socket
import threading
import time

import jax
import numpy as np

from rank_collapse.runs import processes

EVERY = 5.0  # seconds between two signs
SILENT = 40.0  # seconds without any, after which a process counts as stopped


def watch_each_other() -> None:
    """Starts a thread that ends this process when another one stands still; all must call this."""
    from jax.experimental.multihost_utils import process_allgather

    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.bind(("", 0))
    own.settimeout(1.0)
    try:
        host = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
    except OSError:
        host = socket.inet_aton("127.0.0.1")
    token = processes.from_primary(np.frombuffer(secrets.token_bytes(8), np.uint8)).tobytes()
    place = np.frombuffer(host + own.getsockname()[1].to_bytes(2, "big"), np.uint8)
    places = {
        index: (socket.inet_ntoa(bytes(row[:4])), int.from_bytes(bytes(row[4:]), "big"))
        for index, row in enumerate(process_allgather(place))
        if index != jax.process_index()
    }
    message = token + jax.process_index().to_bytes(4, "big")
    arguments = (own, message, places)
    threading.Thread(target=_watch, args=arguments, daemon=True, name="alive").start()


def _watch(own, message, places):
    heard: dict[int, float] = {}
    sent = before = time.monotonic() - EVERY
    while True:
        now = time.monotonic()
        if now - before > SILENT / 2:
            heard.clear()  # this process stood still itself, and has not listened
        before = now
        if now - sent >= EVERY:
            sent = now
            for place in places.values():
                with contextlib.suppress(OSError):
                    own.sendto(message, place)
        with contextlib.suppress(OSError):  # nothing came for a second
            data, place = own.recvfrom(64)
            index = int.from_bytes(data[8:], "big")
            if data[:8] == message[:8] and index in places:
                heard[index], places[index] = time.monotonic(), place
        for index, when in heard.items():
            if time.monotonic() - when > SILENT:
                text = f"process {index} gave no sign of life for {SILENT:g} s"
                os.write(2, f"error: another process of this run has stopped: {text}\n".encode())
                os._exit(1)
