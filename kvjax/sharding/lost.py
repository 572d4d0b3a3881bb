"""Ends a process when another one of its program is lost: soon, and with one sentence.

Every process has a connection to the first. When a process is killed its system closes the connection; the
first process then tells the others, and all end. A machine that is gone does not answer TCP's probes. JAX
alone would notice after its heartbeat's patience and abort with a stack trace.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from typing import NoReturn

import numpy as np

BYE = 2**32 - 1
"""What a process says before it ends by itself. Any other number is that of a lost process."""

CONNECT = 10.0
"""Seconds to make connections; a process without one is watched by JAX alone."""

SETTLE = 1.0
"""Seconds in which a loss comes to light after an error of JAX that it caused."""

PROBES = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4))
"""Of a silent connection: seconds before the first and between two, and how many may stay unanswered."""

_links: dict[socket.socket, int] = {}


def watch(host: str) -> None:
    """Begins to watch the other processes. All call this, once, when they have joined JAX's runtime.

    Args:
      host: of the first process, as the others reach it.
    """
    import jax
    from jax.experimental import multihost_utils

    index, own = jax.process_index(), np.zeros(3, np.uint32)
    with contextlib.ExitStack() as stack:
        if index == 0:
            listener = stack.enter_context(_listener(host))
            own[:] = listener.getsockname()[1], *(secrets.randbits(32) for _ in range(2))
        port, *key = multihost_utils.broadcast_one_to_all(own).tolist()
        if index == 0:
            _links.update(_accepted(listener, key, jax.process_count() - 1))
        else:
            with contextlib.suppress(OSError):
                link = socket.create_connection((host, port), timeout=CONNECT)
                link.sendall(struct.pack("!3I", *key, index))
                _links[link] = 0
    for link in _links:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES:
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    atexit.register(_tell, BYE)
    threading.Thread(target=_listen, name="kvjax-lost", daemon=True).start()


def settle() -> None:
    """After an error of JAX: waits whether a loss was the cause, which ends this process."""
    if _links:
        time.sleep(SETTLE)


def _listener(host: str) -> socket.socket:
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accepted(listener: socket.socket, key: list[int], count: int) -> dict[socket.socket, int]:
    """Connections of so many processes that know the key, and which they are."""
    until, links = time.monotonic() + CONNECT, dict[socket.socket, int]()
    with contextlib.suppress(OSError):
        while len(links) < count:
            listener.settimeout(max(0.0, until - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(1.0)
            with contextlib.suppress(OSError, struct.error):
                *word, index = struct.unpack("!3I", link.recv(12, socket.MSG_WAITALL))
                if word == key:
                    links[link] = index
                    continue
            link.close()
    return links


def _listen() -> None:
    """Waits until all have ended by themselves, or one is lost."""
    with selectors.DefaultSelector() as ready:
        for one in _links:
            ready.register(one, selectors.EVENT_READ)
        while ready.get_map():
            for entry, _ in ready.select():
                link: socket.socket = entry.fileobj  # type: ignore[assignment]
                word = b""
                with contextlib.suppress(OSError):
                    word = link.recv(4, socket.MSG_WAITALL)
                said = struct.unpack("!I", word)[0] if len(word) == 4 else _links[link]
                if said != BYE:
                    _tell(said)
                    _end(said)
                ready.unregister(link)


def _tell(word: int) -> None:
    """Says it to all that this process is connected to."""
    for link in _links:
        with contextlib.suppress(OSError):
            link.sendall(struct.pack("!I", word))


def _end(lost: int) -> NoReturn:
    """Ends this process, whatever its other threads wait for."""
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # another thread may hold it
    flush.start()
    flush.join(SETTLE)
    sentence = (
        f"error: process {lost} of this program was lost, and the others end. Start all of them again.\n"
    )
    os.write(2, sentence.encode())
    os._exit(1)
