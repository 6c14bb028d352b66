"""Between orchestrator and rank 0: a PAIR, a new one for every conversation.

Rank 0 listens at a door (ROUTER); whoever knocks there is told where the PAIR made for it listens, and connects to it
once. A PAIR that is connected to a second time before it has noticed the end of the first connection never lets the
second one in, and libzmq 4.3.5 does not always survive it.
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
from strata.train.link_keys import LinkKeys
from strata.train.settings import ServerSettings
from strata.train.sockets import bounded, decoded, keys_of, listen, own_address, present, publish_address

MAX_RANK_BYTES: Final = 2 << 30
NEVER_MS: Final = 3_600_000


class Knock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Grows with every knock, so that one that was given up and is heard late changes nothing."""

    generation: int
    attempt: int


_encode_knock: Final = msgspec.msgpack.Encoder().encode
_decode_knock: Final = msgspec.msgpack.Decoder(Knock).decode
_decode_answer: Final = msgspec.msgpack.Decoder(str).decode


class RankConnection:
    """The orchestrator's side of one conversation with rank 0: one socket, thrown away with the conversation."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, keys: LinkKeys | None) -> None:
        self._socket = context.socket(zmq.PAIR)
        bounded(self._socket, MAX_RANK_BYTES)
        present(keys, self._socket, endpoint)
        # Whoever wants to speak again knocks again. Not -1: what was heard before the end would be dropped with it.
        self._socket.reconnect_ivl = self._socket.reconnect_ivl_max = NEVER_MS
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)

    async def send(self, message: commands.ToRank) -> None:
        await self._socket.send(commands.encode(message))

    async def receive(self) -> commands.FromRank:
        while True:
            message: commands.FromRank | None = decoded(commands.decode_from_rank, await self._socket.recv())
            if message is not None:
                return message

    async def lost(self) -> None:
        """Return when the connection breaks: rank 0 has gone, or speaks with somebody else."""
        await recv_monitor_message(self._monitor)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


async def knock(
    context: zmq.asyncio.Context, door: str, keys: LinkKeys | None, knocking: Knock
) -> RankConnection | None:
    """A conversation with the rank 0 behind this door; None if it speaks with a newer generation, or knock."""
    socket = context.socket(zmq.DEALER)
    try:
        bounded(socket)
        present(keys, socket, door)
        socket.connect(door)
        await socket.send(_encode_knock(knocking))
        answer: str | None = None
        while answer is None:
            answer = decoded(_decode_answer, await socket.recv())
    finally:
        socket.close(linger=0)
    return RankConnection(context, answer, keys) if answer else None


class RankLink:
    """Rank 0's side. Blocking, for a thread that does nothing else meanwhile.

    `endpoint` is where it listens, with the port it got; `known_as` is how the other ranks reach this machine.
    """

    def __init__(self, settings: ServerSettings, known_as: str = "") -> None:
        self._keys = keys_of(settings)
        self._context = zmq.Context()
        self._gate = self._keys.admit(self._context) if self._keys is not None else None
        self._door = self._context.socket(zmq.ROUTER)
        self._pair: zmq.SyncSocket | None = None
        self._woken, self._waking = os.pipe()
        bounded(self._door)
        self._heard = Knock(0, 0)
        self._conversations = 0
        file = Path(settings.rank0.removeprefix("file:")) if settings.rank0.startswith("file:") else None
        door = f"tcp://{own_address(known_as)}:*" if file else settings.rank0
        try:
            self.endpoint = listen(self._door, door, self._keys)
        except StrataError:
            self.close()
            raise
        if file is not None:
            publish_address(file, self.endpoint)

    def receive(self, timeout_s: float | None = None) -> commands.ToRank | None:
        """The next message; None if none came in time, or somebody woke us."""
        while ready := self._ready(timeout_s):
            if self._woken in ready:
                os.read(self._woken, 1)
                return None
            if self._door in ready:
                self._open()
            elif self._pair is not None:
                message: commands.ToRank | None = decoded(commands.decode_to_rank, self._pair.recv())
                if message is not None:
                    return message
        return None

    def wake(self) -> None:
        """From any thread: there is something to say, though nothing was asked."""
        with contextlib.suppress(OSError):
            os.write(self._waking, b"!")

    def _ready(self, timeout_s: float | None) -> list[zmq.SyncSocket | int]:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for socket in (self._door, self._pair):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        return [socket for socket, _ in poller.poll(None if timeout_s is None else round(timeout_s * 1000))]

    def send(self, message: commands.FromRank) -> bool:
        """At once; False if nobody is connected, in which case the next orchestrator asks for it."""
        if self._pair is None:
            return False
        try:
            self._pair.send(commands.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _open(self) -> None:
        """Answer a knock: with a new conversation in place of the last one, or with nothing."""
        name, *frames = self._door.recv_multipart()
        knocked: Knock | None = decoded(_decode_knock, frames[0]) if len(frames) == 1 else None
        if knocked is None:
            return
        if (knocked.generation, knocked.attempt) <= (self._heard.generation, self._heard.attempt):
            self._door.send_multipart((name, _encode_knock("")))
            return
        self._heard = knocked
        self._conversations += 1
        if self._pair is not None:
            self._pair.close(linger=0)
        self._pair = self._context.socket(zmq.PAIR)
        bounded(self._pair, MAX_RANK_BYTES)
        place = f"{self.endpoint}-{self._conversations}"
        if self.endpoint.startswith("tcp:"):
            place = f"{self.endpoint.rpartition(':')[0]}:*"
        self._door.send_multipart((name, _encode_knock(listen(self._pair, place, self._keys))))

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close(linger=200)
        self._door.close(linger=0)
        waking, self._waking = self._waking, -1
        os.close(self._woken)
        os.close(waking)
        if self._gate is not None:
            self._gate.stop()
        self._context.term()
