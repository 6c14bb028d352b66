"""ZMQ sockets between orchestrator and rank 0: a new PAIR for every connection, connect requests, and messages of at
most 2 GiB.

Rank 0 has a listener (ROUTER). An orchestrator sends it a connect request, gets the endpoint of a new PAIR, and
connects to that once. A PAIR that is connected to a second time before it has noticed the end of the first connection
never accepts the second one, and libzmq 4.3.5 does not always survive it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from strata.base.errors import StrataError
from strata.train.core import commands
from strata.train.link.keys import LinkKeys
from strata.train.link.sockets import (
    connect,
    decode_or_drop,
    listen,
    load_keys,
    own_address,
    present_keys,
    publish_address,
    set_limits,
)
from strata.train.settings import ServerSettings

MAX_RANK_BYTES: Final = 2 << 30
NEVER_MS: Final = 3_600_000


class ConnectRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Grows with every request, so one that has timed out and arrives late changes nothing."""

    generation: int
    attempt: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_request: Final = msgspec.msgpack.Decoder(ConnectRequest).decode
_decode_reply: Final = msgspec.msgpack.Decoder(str).decode


class RankConnection:
    """The orchestrator's side of one connection to rank 0: one socket, closed with the connection."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, keys: LinkKeys | None) -> None:
        self._socket = context.socket(zmq.PAIR)
        set_limits(self._socket, MAX_RANK_BYTES)
        present_keys(keys, self._socket, endpoint)
        # A new connection needs a new connect request. Not -1: messages received before the end would be dropped.
        self._socket.reconnect_ivl = self._socket.reconnect_ivl_max = NEVER_MS
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        connect(self._socket, endpoint)

    async def send(self, message: commands.ToRank) -> None:
        await self._socket.send(commands.encode(message))

    async def receive(self) -> commands.FromRank:
        while True:
            message: commands.FromRank | None = decode_or_drop(commands.decode_from_rank, await self._socket.recv())
            if message is not None:
                return message

    async def lost(self) -> None:
        """Return when the connection breaks: rank 0 has ended, or has accepted another orchestrator."""
        await recv_monitor_message(self._monitor)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


async def connect_rank(
    context: zmq.asyncio.Context, endpoint: str, keys: LinkKeys | None, request: ConnectRequest
) -> RankConnection | None:
    """A connection to the rank 0 that listens there; None if it has accepted a newer generation, or a newer request."""
    socket = context.socket(zmq.DEALER)
    try:
        set_limits(socket)
        present_keys(keys, socket, endpoint)
        connect(socket, endpoint)
        await socket.send(_encode(request))
        pair: str | None = None
        while pair is None:
            pair = decode_or_drop(_decode_reply, await socket.recv())
    finally:
        socket.close(linger=0)
    return RankConnection(context, pair, keys) if pair else None


class RankLink:
    """Rank 0's side. Blocking, for a thread that does nothing else meanwhile.

    `endpoint` is where it listens, with the port it got; `known_as` is how the other ranks reach this machine.
    """

    def __init__(self, settings: ServerSettings, known_as: str = "") -> None:
        self._keys = load_keys(settings)
        self._context = zmq.Context()
        self._authenticator = self._keys.start_authenticator(self._context) if self._keys is not None else None
        self._listener = self._context.socket(zmq.ROUTER)
        self._pair: zmq.SyncSocket | None = None
        self._woken, self._waking = os.pipe()
        set_limits(self._listener)
        self._last_request = ConnectRequest(0, 0)
        self._connections = 0
        file = Path(settings.rank0.removeprefix("file:")) if settings.rank0.startswith("file:") else None
        address = f"tcp://{own_address(known_as)}:*" if file else settings.rank0
        try:
            self.endpoint = listen(self._listener, address, self._keys)
        except StrataError:
            self.close()
            raise
        if file is not None:
            publish_address(file, self.endpoint)

    def receive(self, timeout_s: float | None = None) -> commands.ToRank | None:
        """The next message; None if none came in time, or `wake` was called."""
        while ready := self._ready(timeout_s):
            if self._woken in ready:
                os.read(self._woken, 1)
                return None
            if self._listener in ready:
                self._accept()
            elif self._pair is not None:
                message: commands.ToRank | None = decode_or_drop(commands.decode_to_rank, self._pair.recv())
                if message is not None:
                    return message
        return None

    def wake(self) -> None:
        """Let `receive` return, from any thread, because there is something to send."""
        with contextlib.suppress(OSError):
            os.write(self._waking, b"!")

    def _ready(self, timeout_s: float | None) -> list[zmq.SyncSocket | int]:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for socket in (self._listener, self._pair):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        return [socket for socket, _ in poller.poll(None if timeout_s is None else round(timeout_s * 1000))]

    def send(self, message: commands.FromRank) -> bool:
        """Send without waiting; False if no orchestrator is connected: the next one requests it again."""
        if self._pair is None:
            return False
        try:
            self._pair.send(commands.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _accept(self) -> None:
        """Reply to a connect request: with a new connection in place of the last one, or with nothing if it is old."""
        name, *frames = self._listener.recv_multipart()
        request: ConnectRequest | None = decode_or_drop(_decode_request, frames[0]) if len(frames) == 1 else None
        if request is None:
            return
        if (request.generation, request.attempt) <= (self._last_request.generation, self._last_request.attempt):
            self._listener.send_multipart((name, _encode("")))
            return
        self._last_request = request
        self._connections += 1
        if self._pair is not None:
            self._pair.close(linger=0)
        self._pair = self._context.socket(zmq.PAIR)
        set_limits(self._pair, MAX_RANK_BYTES)
        address = f"{self.endpoint}-{self._connections}"
        if self.endpoint.startswith("tcp:"):
            address = f"{self.endpoint.rpartition(':')[0]}:*"
        self._listener.send_multipart((name, _encode(listen(self._pair, address, self._keys))))

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close(linger=200)
        self._listener.close(linger=0)
        waking, self._waking = self._waking, -1
        os.close(self._woken)
        os.close(waking)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
