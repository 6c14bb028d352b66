"""Unix sockets for clients that are not ours: by a name that is short enough, and as a TCP port."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The folders of tests may have names that are too long for a socket."""
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


@contextmanager
def forwarded(path: Path) -> Iterator[str]:
    """The URL of a port whose connections go on to the Unix socket: for clients that speak TCP alone."""
    with ExitStack() as stack:
        short = stack.enter_context(short_path(path))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        accepting = threading.Thread(target=_accept, args=(listener, short), daemon=True)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join(10)


def _accept(listener: socket.socket, path: str) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:
            client.close()
            server.close()
            continue
        threading.Thread(target=_join, args=(client, server), daemon=True).start()


def _join(client: socket.socket, server: socket.socket) -> None:
    with client, server:
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
