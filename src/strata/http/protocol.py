"""HTTP/1.1 on a connection: uvicorn's own, plus the two things it does not do.

The client certificate that TLS has verified reaches the application through the scope, where no header can forge it.
And bytes that lead to no request (a head that does not end, the rest of a body nobody wants) may come for a while only.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from strata.http.root import PEER

HEADER_S: Final = 10.0
TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class PatientProtocol(H11Protocol):
    header_s = HEADER_S
    farewell = TOO_SLOW

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) if tls is not None else None
        if der:
            self.app = _with_peer(self.app, der)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._busy():
            self._settle()
        else:
            self._expect()

    def on_response_complete(self) -> None:
        # From here on the timer for idle connections counts, until more bytes come.
        self._settle()
        super().on_response_complete()

    def _busy(self) -> bool:
        """A request is being answered; how slowly its body may come is the application's matter."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _expect(self) -> None:
        if self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(self.header_s, self._give_up)

    def _settle(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        if not self.transport.is_closing() and not self._busy():
            if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
                self.transport.write(self.farewell)
            self.transport.close()


def _with_peer(app: Any, der: bytes) -> ASGIApp:
    async def with_peer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[PEER] = der
        await app(scope, receive, send)

    return with_peer


def protocol(header_s: float, farewell: bytes = TOO_SLOW) -> type[PatientProtocol]:
    """`farewell` is written to a client of whom nothing but a part of a head came in time."""
    return type("PatientProtocol", (PatientProtocol,), {"header_s": header_s, "farewell": farewell})
