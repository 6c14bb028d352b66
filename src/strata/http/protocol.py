"""HTTP/1.1 on a connection: timeout of a head (10 s), rest of a body, slow readers, and the limit of anonymous
connections.

The client certificate that TLS has verified reaches the application through the scope, where no header can forge it.
A head that does not end, or the rest of a body that the server does not want, times out. A connection without
credentials or a certificate counts against the limit of anonymous connections. A client that does not read its reply
is disconnected.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from strata.http.anonymous import KEEP_ALIVE_S, AnonymousConnections
from strata.http.authentication import CLIENT_CERTIFICATE, UNIX_SOCKET
from strata.http.root import CONNECTION, SEND_S

HEADER_S: Final = 10.0
REQUEST_TIMEOUT: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class LimitedProtocol(H11Protocol):
    header_s = HEADER_S
    timeout_reply = REQUEST_TIMEOUT
    send_s = SEND_S
    anonymous = AnonymousConnections()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        extras: dict[str, Any] = {CONNECTION: self, CLIENT_CERTIFICATE: der} if der else {CONNECTION: self}
        if transport.get_extra_info("socket").family == socket.AF_UNIX:
            # Only the server's own user can open it.
            extras[UNIX_SOCKET] = True
        elif not der:
            self._limit_anonymous()
        self.app = _extend_scope(self.app, extras)
        self._start_head_timer()

    def _limit_anonymous(self) -> None:
        self.timeout_keep_alive = min(KEEP_ALIVE_S, self.timeout_keep_alive)
        address = self.client[0] if self.client else ""
        if not self.anonymous.add(self, address, self.limit_concurrency or sys.maxsize):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_write_timer()
        self.anonymous.remove(self)
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        super().connection_lost(exc)

    def mark_authenticated(self) -> None:
        """A request on this connection had good credentials: it does not count as anonymous any more."""
        self.anonymous.remove(self)
        self.timeout_keep_alive = self.config.timeout_keep_alive

    def abort(self) -> None:
        """Close without sending the rest: a client that reads nothing would keep it for ever."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy():
            self._cancel_head_timer()
        else:
            self._start_head_timer()

    def on_response_complete(self) -> None:
        # From here on the keep-alive timer counts, until more bytes come.
        self._cancel_head_timer()
        super().on_response_complete()
        if self._drain_timer is None:
            self._start_drain_timer()

    def pause_writing(self) -> None:
        """The write buffer is full: the client has a limited time to read from it."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.send_s, self.abort)

    def resume_writing(self) -> None:
        self._cancel_write_timer()
        super().resume_writing()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_drain_timer(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._drain_timer = self.loop.call_later(self.send_s, self._check_drained, left) if left else None

    def _check_drained(self, before: int) -> None:
        """The client has to read half of the write buffer within each interval."""
        if self.transport.get_write_buffer_size() > before // 2 and not self.busy():
            self.abort()
            self._drain_timer = None
        else:
            self._start_drain_timer()

    def busy(self) -> bool:
        """A request is being handled; how slowly its body may arrive is the application's matter."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def incomplete(self) -> bool:
        return self.busy() and self.cycle.more_body

    def _start_head_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.header_s, self._head_timed_out)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing() and not self.busy():
            if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
                self.transport.write(self.timeout_reply)
            self.transport.close()


def _extend_scope(app: Any, extras: dict[str, Any]) -> ASGIApp:
    async def with_extras(scope: Scope, receive: Receive, send: Send) -> None:
        scope.update(extras)
        await app(scope, receive, send)

    return with_extras


def new_protocol(
    header_s: float, timeout_reply: bytes = REQUEST_TIMEOUT, send_s: float = SEND_S
) -> type[LimitedProtocol]:
    """The protocol of one server. `timeout_reply` is sent to a client that has sent only a part of a head in time."""
    attributes = {
        "header_s": header_s,
        "timeout_reply": timeout_reply,
        "send_s": send_s,
        "anonymous": AnonymousConnections(),
    }
    return type("LimitedProtocol", (LimitedProtocol,), attributes)
