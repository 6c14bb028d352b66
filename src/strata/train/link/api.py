"""ZMQ sockets between API server and orchestrator: requests one way, replies the other, the handshake after restarts,
and errors while the orchestrator is behind or away.

An API server listens on a ROUTER (requests) and a PULL (replies); the orchestrator connects a DEALER and a PUSH to each
API server. A DEALER is named after the orchestrator's generation and probes every connection it makes: that is its
handshake, after its own restart and after a restart of the API server.
"""

from __future__ import annotations

import asyncio
import re
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.asyncio

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.link import messages
from strata.train.link.sockets import connect, decode_or_drop, listen, load_keys, raise_send_error, set_limits
from strata.train.settings import ServerSettings

_NAME: Final = re.compile(rb"orchestrator-([0-9]{1,18})")

_log = log.get(__name__)


class OrchestratorClient:
    """The API server's side. Requests survive a restart of the orchestrator: those without a reply are sent again.

    That is safe because every request is idempotent: an operation is identified by its model and sequence number, and
    all others only read, or state what is so already.
    """

    def __init__(self, settings: ServerSettings, number: int = 0) -> None:
        self._settings = settings
        self._number = number
        self._pending: dict[str, tuple[bytes, asyncio.Future[messages.Output]]] = {}
        self._orchestrator: tuple[int, bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        keys = load_keys(self._settings)
        self._authenticator = keys.start_authenticator(self._context) if keys is not None else None
        self._requests = self._context.socket(zmq.ROUTER)
        # Sending to an unknown name is an error, not a dropped message; a name that connects again is taken over.
        self._requests.router_mandatory = True
        self._requests.router_handover = True
        self._replies = self._context.socket(zmq.PULL)
        settings, number = self._settings, self._number
        sockets = ((self._requests, settings.requests_of(number)), (self._replies, settings.outputs_of(number)))
        try:
            for socket, endpoint in sockets:
                set_limits(socket)
                listen(socket, endpoint, keys)
        except StrataError:
            self._close()
            raise
        self._tasks = [asyncio.create_task(self._accept_handshakes()), asyncio.create_task(self._receive_replies())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for _, reply in self._pending.values():
            reply.cancel()
        self._close()

    def _close(self) -> None:
        self._requests.close(linger=0)
        self._replies.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    @property
    def generation(self) -> int | None:
        """The generation of the orchestrator that connected last; None before the first."""
        return self._orchestrator[0] if self._orchestrator else None

    async def request(self, request: messages.OrchestratorRequest, *, timeout_s: float) -> messages.Output:
        """The reply, which may be a refusal. UNAVAILABLE if there is none in time: the request may have arrived or not.

        EXHAUSTED if the orchestrator does not take requests as fast as they come.
        """
        if request.request_id in self._pending:
            raise StrataError(Code.CONFLICT, f"{request.request_id!r} is sent already")
        reply: asyncio.Future[messages.Output] = asyncio.get_running_loop().create_future()
        body = messages.encode(request)
        self._pending[request.request_id] = body, reply
        try:
            self._send(body)
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            raise StrataError(
                Code.UNAVAILABLE,
                f"the orchestrator has not replied within {timeout_s:g} seconds",
                hint="retry: it may be starting",
            ) from error
        finally:
            self._pending.pop(request.request_id, None)

    def _send(self, body: bytes) -> None:
        if self._orchestrator is None:
            return
        try:
            raise_send_error(self._requests.send_multipart((self._orchestrator[1], body), flags=zmq.NOBLOCK))
        except zmq.Again as error:
            raise StrataError(Code.EXHAUSTED, "the orchestrator is behind with requests", hint="retry later") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # It is gone. The next one connects and gets the request again.

    async def _accept_handshakes(self) -> None:
        while True:
            name, *frames = await self._requests.recv_multipart()
            match = _NAME.fullmatch(name)
            if match is None or frames != [b""]:
                _log.warning("handshake_dropped", bytes=sum(map(len, frames)))
                continue
            generation = int(match[1])
            if self._orchestrator is not None and generation < self._orchestrator[0]:
                _log.warning("stale_orchestrator_refused", generation=generation)
                continue
            self._orchestrator = generation, name
            _log.info("orchestrator_connected", generation=generation, resent=len(self._pending))
            for body, reply in list(self._pending.values()):
                try:
                    self._send(body)
                except StrataError as error:
                    if not reply.done():
                        reply.set_exception(error)

    async def _receive_replies(self) -> None:
        while True:
            outputs = decode_or_drop(messages.decode_outputs, await self._replies.recv())
            if outputs is not None:
                # Without a pending request the reply is late: the request was sent again, or has timed out.
                _, reply = self._pending.get(outputs.request_id, (b"", None))
                if reply is not None and not reply.done():
                    reply.set_result(outputs.output)


class ApiLink:
    """The orchestrator's side of the link to one API server."""

    def __init__(
        self, context: zmq.asyncio.Context, settings: ServerSettings, generation: int, number: int = 0
    ) -> None:
        keys = load_keys(settings) if settings.server.transport == "tcp" else None
        self._requests = context.socket(zmq.DEALER)
        self._requests.identity = f"orchestrator-{generation}".encode()
        # The probe is sent with every new pipe, and only with `immediate` a connection that comes back has a new one.
        self._requests.probe_router = True
        self._requests.immediate = True
        self._replies = context.socket(zmq.PUSH)
        sockets = ((self._requests, settings.requests_of(number)), (self._replies, settings.outputs_of(number)))
        for socket, endpoint in sockets:
            set_limits(socket)
            if keys is not None:
                keys.secure_client(socket)
            connect(socket, endpoint)

    async def receive(self) -> messages.OrchestratorRequest:
        """The next request; bytes that are none are dropped."""
        while True:
            frames = await self._requests.recv_multipart()
            request = decode_or_drop(messages.decode_request, frames[-1]) if len(frames) == 1 else None
            if request is not None:
                return request

    def send(self, outputs: messages.OrchestratorOutputs) -> None:
        """Sends without waiting. A reply that does not fit into the queue is dropped: the API server does not read."""
        try:
            raise_send_error(self._replies.send(messages.encode(outputs), flags=zmq.NOBLOCK))
        except zmq.Again:
            _log.warning("reply_dropped", request_id=outputs.request_id)

    def close(self) -> None:
        self._requests.close(linger=0)
        # A last reply may still be sent; it must not delay the shutdown.
        self._replies.close(linger=200)
