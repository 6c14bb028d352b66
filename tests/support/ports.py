"""A loopback port that stays ours while nothing listens on it."""

from __future__ import annotations

import socket


def reserve_port(host: str = "127.0.0.1") -> socket.socket:
    """A bound socket that never listens; read the port from it, keep it open as long as the port is needed.

    While it is open the kernel gives the port to no other process, but a listener with SO_REUSEADDR (PostgreSQL and
    ours set it) can bind it too. Without it a client that retries a dead server's port can be given that very port as
    its own source port, and then it is connected to itself.
    """
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        guard.bind((host, 0))
    except OSError:
        guard.close()
        raise
    return guard


def port_of(guard: socket.socket) -> int:
    port: int = guard.getsockname()[1]
    return port
