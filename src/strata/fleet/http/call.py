"""One request of the hub, as its endpoints get it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive

from strata.identity.roles import Principal


@dataclass(slots=True)
class Call:
    """One request, after its caller is known."""

    caller: Principal
    path: Mapping[str, str]
    headers: Headers
    receive: Receive
    welcome: Callable[[], Awaitable[None]]
    """Asks again whether the caller may be here: for replies that go on for long."""

    @property
    def actor(self) -> str:
        return self.caller.actor

    async def gone(self) -> None:
        """Returns when the client has left. Only after its body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
