"""`python -m tests.e2e.stranger ADDRESS FILE`: connects to rank 0 with keys of all sorts and prints what came of each.

FILE has the right keys. The requests of strangers claim to come from an orchestrator newer than any other: rank 0 would
leave its own for them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from strata.train.link.keys import LinkKeys, make_keys, read_keys
from strata.train.link.rank import ConnectRequest

PATIENCE_MS: Final = 20_000
_REFUSED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


def connect_rank(context: zmq.Context[Any], address: str, keys: LinkKeys | None, request: ConnectRequest) -> str:
    """`answered`, `refused`, or neither of them in time."""
    socket = context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        if keys is not None:
            keys.secure_client(socket)
        socket.connect(address)
        socket.send(msgspec.msgpack.encode(request))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while ready := dict(poller.poll(PATIENCE_MS)):
            if socket in ready:
                return "answered"
            if parse_monitor_message(monitor.recv_multipart())["event"] & _REFUSED:
                return "refused"
        return "nothing"
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)


def main(address: str, file: Path) -> None:
    right = read_keys(file)
    with tempfile.TemporaryDirectory() as folder:
        other = make_keys(Path(folder) / "other.keys")
    half = LinkKeys(right.server_public, right.server_secret, other.client_public, other.client_secret)
    newest = ConnectRequest(1 << 40, 1)
    context = zmq.Context()
    found = {
        "without keys": connect_rank(context, address, None, newest),
        "with other keys": connect_rank(context, address, other, newest),
        "knowing whom it speaks to": connect_rank(context, address, half, newest),
        # A reply, which is that this request is older than the one before.
        "with the keys": connect_rank(context, address, right, ConnectRequest(0, 0)),
    }
    context.destroy(linger=0)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
