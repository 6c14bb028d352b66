"""Options of all ZMQ sockets of the links: queue length (1,000), request size (16 MiB), keys, addresses in files, and
decoding that drops what is malformed.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import zmq

from strata.base import log
from strata.base.atomic import write_file
from strata.base.errors import Code, StrataError
from strata.base.private import require_private_folder
from strata.base.unix_socket import lasting_path
from strata.train.link.keys import LinkKeys, read_keys
from strata.train.settings import ServerSettings

MAX_QUEUED: Final = 1_000
"""Messages that may wait in one direction of a link: the high-water mark."""
MAX_REQUEST_BYTES: Final = 16 << 20
_IPC: Final = "ipc://"

_log = log.get(__name__)
Message = TypeVar("Message")
AnySocket = zmq.Socket[Any]


def load_keys(settings: ServerSettings) -> LinkKeys | None:
    """None if the sockets lie in a folder of the owner alone and need no keys."""
    over_tcp = settings.server.transport == "tcp" or settings.rank0.startswith(("tcp:", "file:"))
    return read_keys(settings.keys) if over_tcp else None


def publish_address(file: Path, endpoint: str) -> None:
    """Atomically: a reader never sees half an address."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(file, f"{endpoint}\n".encode(), durable=False)


def read_address(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None


def raise_send_error(sent: Awaitable[Any]) -> None:
    """Raise what sending with NOBLOCK raised: pyzmq returns a future that is done."""
    assert isinstance(sent, asyncio.Future)
    sent.result()


def present_keys(keys: LinkKeys | None, socket: AnySocket, endpoint: str) -> None:
    if keys is not None and endpoint.startswith("tcp:"):
        keys.secure_client(socket)


def set_limits(socket: AnySocket, max_bytes: int = MAX_REQUEST_BYTES) -> None:
    """Limit the queue of a socket and the size of a message, and set its reconnects and heartbeats."""
    socket.set_hwm(MAX_QUEUED)
    socket.maxmsgsize = max_bytes
    socket.linger = 0
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 500
    # Also a machine that vanished without closing its connections is noticed.
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 20_000


def listen(socket: AnySocket, endpoint: str, keys: LinkKeys | None) -> str:
    """Listen there; the address that others connect to."""
    local = endpoint.startswith(_IPC)
    if local:
        require_private_folder(Path(endpoint.removeprefix(_IPC)).parent, "the sockets")
    elif keys is None:
        raise StrataError(Code.INTERNAL, f"{endpoint} would be open to all users")
    else:
        keys.secure_listener(socket)
    try:
        socket.bind(_short(endpoint))
    except zmq.ZMQError as error:
        raise StrataError(Code.UNAVAILABLE, f"cannot listen on {endpoint}: {error}") from error
    return endpoint if local else bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")


def connect(socket: AnySocket, endpoint: str) -> None:
    socket.connect(_short(endpoint))


def _short(endpoint: str) -> str:
    """The same place by a name that is short enough for a socket."""
    if not endpoint.startswith(_IPC):
        return endpoint
    return f"{_IPC}{lasting_path(Path(endpoint.removeprefix(_IPC)))}"


def own_address(known_as: str = "") -> str:
    """The address of this machine that others on its network reach it by; loopback if there is none.

    `known_as` is the best one: a machine may have several, and without a default route none is found. Loopback only
    says that the processes that know it so far are on this machine.
    """
    try:
        address = sockets.gethostbyname(known_as) if known_as else ""
    except OSError:
        address = ""
    if address and not ip_address(address).is_loopback:
        return address
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only looks up the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def decode_or_drop(decode: Callable[[bytes], Message], data: bytes) -> Message | None:
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning("message_dropped", bytes=len(data), reason=str(error))
        return None
