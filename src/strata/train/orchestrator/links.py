"""How the orchestrator reaches API servers and rank 0: over ZMQ, or whatever a simulation puts in its place."""

from __future__ import annotations

from typing import Protocol

import zmq.asyncio

from strata.train.core import commands, messages
from strata.train.link import ApiLink, Knock, keys_of, knock
from strata.train.settings import ServerSettings


class ApiSide(Protocol):
    """`strata.train.link.ApiLink`."""

    async def receive(self) -> messages.OrchestratorRequest: ...

    def send(self, outputs: messages.OrchestratorOutputs) -> None: ...

    def close(self) -> None: ...


class RankSide(Protocol):
    """`strata.train.link.RankConnection`."""

    async def send(self, message: commands.ToRank) -> None: ...

    async def receive(self) -> commands.FromRank: ...

    async def lost(self) -> None: ...

    def close(self) -> None: ...


class Links(Protocol):
    def api(self, generation: int, number: int = 0) -> ApiSide:
        """To one of the API servers."""
        ...

    async def knock(self, door: str, knocking: Knock) -> RankSide | None:
        """A conversation with rank 0; None if it speaks with a newer generation, or knock."""
        ...

    def close(self) -> None: ...


class ZmqLinks:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._keys = keys_of(settings)
        self._context = zmq.asyncio.Context()

    def api(self, generation: int, number: int = 0) -> ApiSide:
        return ApiLink(self._context, self._settings, generation, number)

    async def knock(self, door: str, knocking: Knock) -> RankSide | None:
        return await knock(self._context, door, self._keys, knocking)

    def close(self) -> None:
        self._context.destroy(linger=200)
