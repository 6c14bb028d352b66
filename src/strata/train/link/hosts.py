"""Messages and sockets between the first host of a server and the others: reports and orders, settings, and files by
root and name; one ROUTER with CURVE keys, DEALERs on the other side.

A host that joins has an invite: the public key of the first host and the secret of its clients. Nothing listens on the
hosts that join.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.checkpoints.checkpoint import CheckpointFile
from strata.train.link.keys import ClientKeys, LinkKeys
from strata.train.link.sockets import connect, decode_or_drop, listen, raise_send_error, set_limits
from strata.train.plan.host_plan import HostReport, Name, RankGeneration

PART_BYTES: Final = 4 << 20
"""How much of a file travels in one message."""
REPLY_S: Final = 10.0
"""How long a reply may take before the request is sent again: every request can be repeated."""
POLL_S: Final = 0.5
"""How soon a client that waits for a reply notices that it is to stop."""
TIMEOUT_S: Final = 60.0
"""How long the first host may be away before whoever needs a file of it gives up."""

MAX_ANSWERING: Final = 64
"""Requests for files that are answered at once; others are dropped, and asked again."""
MARGIN_BYTES: Final = 1 << 20
"""What a message may have beside a part of a file."""
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Where a part is in a file of at most 1 TiB."""

Plain = bool | int | float | str
Root = Literal["model", "snapshots", "checkpoints"]
"""What the first host has files of."""


class Folder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder below a root, by its name there: no path of a host is sent."""

    root: Root
    name: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class GetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="settings"):
    pass


class ListFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list"):
    folder: Folder


class ReadPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="read"):
    folder: Folder
    file: Name
    offset: Offset


class WritePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="write"):
    """A part of a file that a rank has written. Nobody sees the file before it is sealed."""

    run: Name
    generation: int
    folder: Folder
    file: Name
    offset: Offset
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]


class SealFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="seal"):
    """All parts are there: the file is verified, made durable, and gets its name."""

    run: Name
    generation: int
    folder: Folder
    file: Name
    expected: CheckpointFile


class HostOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="order"):
    """What a host is to do now."""

    run: str
    ranks: RankGeneration | None
    lost_after_s: float
    """A host that hears nothing for so long ends its ranks."""
    refused: str = ""
    """Why this host can never have ranks."""


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="settings"):
    """What ranks need of the server's settings."""

    run: str
    sections: Mapping[str, Mapping[str, Plain]]
    model: str
    """Where the model is on the first host: a host that has the same files there does not fetch them."""


class FileList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="files"):
    files: Mapping[str, CheckpointFile]
    """Digests are those of the model's files; a snapshot and a checkpoint have theirs in a manifest."""


class FilePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="part"):
    data: bytes


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="written"):
    pass


class RequestFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    code: Code
    message: str


FileRequest = GetSettings | ListFiles | ReadPart | WritePart | SealFile
FileReply = HostSettings | FileList | FilePart | Written | RequestFailed


class _FromHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    number: int
    body: HostReport | FileRequest


class _ToHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    number: int
    """That of the request; 0 for an order."""
    body: HostOrder | FileReply


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_from_host: Final = msgspec.msgpack.Decoder(_FromHost).decode
_decode_to_host: Final = msgspec.msgpack.Decoder(_ToHost).decode
Reply = TypeVar("Reply", bound=FileReply)
_log = log.get(__name__)


class HostsListener:
    """The first host's side. `on_report` is called with each report; `answer` with each request for a file."""

    def __init__(
        self,
        endpoint: str,
        keys: LinkKeys,
        on_report: Callable[[HostReport], HostOrder],
        answer: Callable[[FileRequest], Awaitable[FileReply]],
    ) -> None:
        self._on_report = on_report
        self._answer = answer
        self._peers: dict[str, bytes] = {}
        self._answering: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        keys.accept_clients(self._authenticator)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        _set_limits(self._socket)
        try:
            self.endpoint = listen(self._socket, endpoint, keys)
        except StrataError:
            self.close()
            raise

    async def run(self) -> None:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            message = decode_or_drop(_decode_from_host, frames[0]) if len(frames) == 1 else None
            if message is None:
                continue
            if isinstance(message.body, HostReport):
                order = self._on_report(message.body)
                if not order.refused:
                    self._peers[message.body.name] = peer
                self._send(peer, _ToHost(0, order))
                continue
            self._start_reply(peer, message.number, message.body)

    def order(self, host: str, order: HostOrder) -> bool:
        """Send an order now: with the host's next report it would come too, but later. False if it has gone."""
        return (peer := self._peers.get(host)) is not None and self._send(peer, _ToHost(0, order))

    def _start_reply(self, peer: bytes, number: int, request: FileRequest) -> None:
        asked = (peer, number)
        if asked in self._answering:
            # It takes longer than a client waits before it asks again: the reply is for both.
            return
        if len(self._answering) >= MAX_ANSWERING:
            _log.debug("host_request_dropped", answering=len(self._answering))
            return
        task = self._answering[asked] = asyncio.create_task(self._reply(peer, number, request))
        task.add_done_callback(lambda _: self._answering.pop(asked))

    async def _reply(self, peer: bytes, number: int, request: FileRequest) -> None:
        try:
            reply = await self._answer(request)
        except StrataError as error:
            reply = RequestFailed(error.code, error.message)
        except OSError as error:
            reply = RequestFailed(Code.UNAVAILABLE, str(error))
        self._send(peer, _ToHost(number, reply))

    def _send(self, peer: bytes, message: _ToHost) -> bool:
        try:
            raise_send_error(self._socket.send_multipart((peer, _encode(message)), flags=zmq.NOBLOCK))
        except zmq.ZMQError as error:
            # It has gone, or does not read. It asks again.
            _log.debug("host_reply_dropped", reason=str(error))
            return error.errno != zmq.EHOSTUNREACH
        return True

    def close(self) -> None:
        for task in self._answering.values():
            task.cancel()
        self._socket.close(linger=200)
        self._authenticator.stop()
        self._context.term()


class HostLink:
    """The reports of a host that joined, and the orders that it gets."""

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = _connected(self._context, endpoint, keys)

    def report(self, report: HostReport) -> None:
        try:
            raise_send_error(self._socket.send(_encode(_FromHost(0, report)), flags=zmq.NOBLOCK))
        except zmq.Again:
            # The first host is away. The next report says the same.
            _log.debug("host_report_dropped")

    async def receive(self) -> HostOrder:
        while True:
            message = decode_or_drop(_decode_to_host, await self._socket.recv())
            if message is not None and isinstance(message.body, HostOrder):
                return message.body

    def close(self) -> None:
        self._socket.close(linger=200)
        self._context.term()


class FirstHostClient:
    """Settings and files of the first host. Blocking, for one thread at a time."""

    def __init__(
        self, endpoint: str, keys: ClientKeys, timeout_s: float = TIMEOUT_S, stop: threading.Event | None = None
    ) -> None:
        self._context = zmq.Context()
        self._socket = _connected(self._context, endpoint, keys)
        self._timeout_s = timeout_s
        self._stop = stop or threading.Event()
        self._number = 0

    def request(self, request: FileRequest, kind: type[Reply], *, at_least_s: float = 0.0) -> Reply:
        """UNAVAILABLE if the first host does not answer in time, which is longer for what takes it long, or if this
        client is to stop."""
        timeout_s = max(self._timeout_s, at_least_s)
        self._number += 1
        data, started_s = _encode(_FromHost(self._number, request)), time.monotonic()
        while time.monotonic() - started_s < timeout_s:
            self.check_stop()
            try:
                self._socket.send(data, flags=zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.1)
                continue
            if (reply := self._receive()) is None:
                continue
            if isinstance(reply, RequestFailed):
                raise StrataError(reply.code, f"the first host: {reply.message}")
            if not isinstance(reply, kind):
                raise StrataError(Code.INTERNAL, f"the first host answered with {type(reply).__name__}")
            return reply
        raise StrataError(Code.UNAVAILABLE, f"the first host has not answered for {timeout_s:g} seconds")

    def _receive(self) -> FileReply | None:
        """The reply to the last request; None if there was none in time. Replies to earlier ones are dropped."""
        deadline_s = time.monotonic() + REPLY_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            self.check_stop()
            if not self._socket.poll(round(min(left_s, POLL_S) * 1000)):
                continue
            message = decode_or_drop(_decode_to_host, self._socket.recv())
            if message is not None and message.number == self._number and not isinstance(message.body, HostOrder):
                return message.body
        return None

    def check_stop(self) -> None:
        """UNAVAILABLE if this client is to stop."""
        if self._stop.is_set():
            raise StrataError(Code.UNAVAILABLE, "what the files were for is over")

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def _set_limits(socket: zmq.Socket[Any]) -> None:
    set_limits(socket, PART_BYTES + MARGIN_BYTES)
    # A host that was cut off connects again soon after it can.
    socket.heartbeat_ivl = 1_000
    socket.heartbeat_timeout = 5_000


def _connected(context: zmq.Context[Any], endpoint: str, keys: ClientKeys) -> Any:
    socket = context.socket(zmq.DEALER)
    _set_limits(socket)
    # What is not sent now would be out of date when the first host is back.
    socket.immediate = True
    keys.secure_client(socket)
    connect(socket, endpoint)
    return socket
