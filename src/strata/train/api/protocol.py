"""HTTP/1.1 on a connection: uvicorn's own, with an end to the patience for a head that does not come."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEADER_S: Final = 10.0


class PatientProtocol(H11Protocol):
    """Bytes that lead to no request may come for `HEADER_S`; an idle connection is the keep-alive timer's matter."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        self._settle()
        super().on_response_complete()

    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _expect(self) -> None:
        if self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(HEADER_S, self._give_up)

    def _settle(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        if not self.transport.is_closing() and not self._busy():
            self.transport.close()
