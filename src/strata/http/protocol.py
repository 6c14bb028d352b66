"""HTTP/1.1 on a connection: uvicorn's own, plus what it does not do.

The client certificate that TLS has verified reaches the application through the scope, where no header can forge it.
Bytes that lead to no request (a head that does not end, the rest of a body nobody wants) may come for a while only.
A client that shows no credentials, nor has a certificate, has one of few places, and one that does not take its reply
is cut off.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from strata.http.root import CONNECTION, PEER, SEND_S, UNIX
from strata.http.strangers import KEEP_ALIVE_S, Strangers

HEADER_S: Final = 10.0
TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class PatientProtocol(H11Protocol):
    header_s = HEADER_S
    farewell = TOO_SLOW
    send_s = SEND_S
    strangers = Strangers()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._overdue: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        noted: dict[str, Any] = {CONNECTION: self, PEER: der} if der else {CONNECTION: self}
        if transport.get_extra_info("socket").family == socket.AF_UNIX:
            # The server's own user, as nobody else can open it.
            noted[UNIX] = True
        elif not der:
            self._take_place()
        self.app = _with(self.app, noted)
        self._expect()

    def _take_place(self) -> None:
        self.timeout_keep_alive = min(KEEP_ALIVE_S, self.timeout_keep_alive)
        address = self.client[0] if self.client else ""
        if not self.strangers.add(self, address, self.limit_concurrency or sys.maxsize):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        self._unstick()
        self.strangers.remove(self)
        if self._untaken is not None:
            self._untaken.cancel()
        super().connection_lost(exc)

    def show_credentials(self) -> None:
        """The application knows who calls on this connection."""
        self.strangers.remove(self)
        self.timeout_keep_alive = self.config.timeout_keep_alive

    def abort(self) -> None:
        """Without what was not sent yet: a client that takes nothing would keep it for ever."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.busy():
            self._settle()
        else:
            self._expect()

    def on_response_complete(self) -> None:
        # From here on the timer for idle connections counts, until more bytes come.
        self._settle()
        super().on_response_complete()
        if self._untaken is None:
            self._watch()

    def pause_writing(self) -> None:
        """More waits to be sent than may; if it does not become less in time, nobody takes it."""
        super().pause_writing()
        self._stuck = self.loop.call_later(self.send_s, self.abort)

    def resume_writing(self) -> None:
        self._unstick()
        super().resume_writing()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _watch(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._untaken = self.loop.call_later(self.send_s, self._check_taken, left) if left else None

    def _check_taken(self, before: int) -> None:
        """What waits to be sent has to become half of it in the time a piece may take."""
        if self.transport.get_write_buffer_size() > before // 2 and not self.busy():
            self.abort()
            self._untaken = None
        else:
            self._watch()

    def busy(self) -> bool:
        """A request is being answered; how slowly its body may come is the application's matter."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def incomplete(self) -> bool:
        return self.busy() and self.cycle.more_body

    def _expect(self) -> None:
        if self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(self.header_s, self._give_up)

    def _settle(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        if not self.transport.is_closing() and not self.busy():
            if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
                self.transport.write(self.farewell)
            self.transport.close()


def _with(app: Any, noted: dict[str, Any]) -> ASGIApp:
    async def with_notes(scope: Scope, receive: Receive, send: Send) -> None:
        scope.update(noted)
        await app(scope, receive, send)

    return with_notes


def protocol(header_s: float, farewell: bytes = TOO_SLOW, send_s: float = SEND_S) -> type[PatientProtocol]:
    """For one server. `farewell` is written to a client of whom nothing but a part of a head came in time."""
    own = {"header_s": header_s, "farewell": farewell, "send_s": send_s, "strangers": Strangers()}
    return type("PatientProtocol", (PatientProtocol,), own)
