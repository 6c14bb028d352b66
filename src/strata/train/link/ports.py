"""The orchestrator's links as ports (protocols), and their adapter over ZMQ; a simulation has another."""

from __future__ import annotations

from typing import Protocol

import zmq.asyncio

from strata.train.core import commands
from strata.train.link import messages
from strata.train.link.api import ApiLink
from strata.train.link.rank import ConnectRequest, connect_rank
from strata.train.link.sockets import load_keys
from strata.train.settings import ServerSettings


class ApiSide(Protocol):
    """`strata.train.link.api.ApiLink`."""

    async def receive(self) -> messages.OrchestratorRequest: ...

    def send(self, outputs: messages.OrchestratorOutputs) -> None: ...

    def close(self) -> None: ...


class RankSide(Protocol):
    """`strata.train.link.rank.RankConnection`."""

    async def send(self, message: commands.ToRank) -> None: ...

    async def receive(self) -> commands.FromRank: ...

    async def lost(self) -> None: ...

    def close(self) -> None: ...


class Links(Protocol):
    def api(self, generation: int, number: int = 0) -> ApiSide:
        """Connects to one of the API servers."""
        ...

    async def connect_rank(self, endpoint: str, request: ConnectRequest) -> RankSide | None:
        """A connection to rank 0; None if it has accepted a newer generation, or a newer request."""
        ...

    def close(self) -> None: ...


class ZmqLinks:
    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._keys = load_keys(settings)
        self._context = zmq.asyncio.Context()

    def api(self, generation: int, number: int = 0) -> ApiSide:
        return ApiLink(self._context, self._settings, generation, number)

    async def connect_rank(self, endpoint: str, request: ConnectRequest) -> RankSide | None:
        return await connect_rank(self._context, endpoint, self._keys, request)

    def close(self) -> None:
        self._context.destroy(linger=200)
